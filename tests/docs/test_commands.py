"""Commands that the documents tell to run exist and know the options that they are given."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from pages import ROOT, blocks, commands, is_run_elsewhere, pages, read

from ldt.cli import build_parser

COMMANDS = sorted(
    {command for page in pages() for command in re.findall(r"`python (benchmarks/[^`]*)`", read(page))}
    | {
        command.removeprefix("python ")
        for page in pages()
        for block in blocks(page)
        if block.language == "sh"
        for command in commands(block)
        if command.startswith("python benchmarks/")
    }
)


@pytest.mark.parametrize("script", sorted({command.split()[0] for command in COMMANDS}))
def test_commands_are_known(script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        if command.split()[0] == script:
            for option in re.findall(r"--[a-z-]+", command):
                assert option in done.stdout, command


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_shell_block_is_known(page: str) -> None:
    for block in blocks(page):
        if block.language == "sh" and not is_run_elsewhere(block):
            for command in commands(block):
                check = next((check for start, check in CHECKS.items() if command.startswith(start)), None)
                assert check is not None, f"{page}:{block.line}: what checks {command!r}?"
                check(shlex.split(command), page)


def check_make(words: list[str], page: str) -> None:
    """The target is in the Makefile; the options of its ARGS are tested for the demo (test_readme.py)."""
    targets = set(re.findall(r"^([a-z-]+)[a-z ]*:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert words[1] in targets, words
    for word in words[2:]:
        assert word.split("=")[0] in (ROOT / "Makefile").read_text("utf-8"), words


def check_pip(words: list[str], page: str) -> None:
    """The extra is one of the package."""
    (what,) = words[2:]
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert what == "." or what.removeprefix(".[").removesuffix("]") in extras, words


def check_ldt(words: list[str], page: str) -> None:
    """The command line is understood. Those that show their output are run in test_pages.py."""
    build_parser().parse_args(words[3:])


def check_script(words: list[str], page: str) -> None:
    """The script is in the repository and has the options, or is the program of a page."""
    script = next(word for word in words if word.endswith(".py"))
    if not (ROOT / script).exists():
        titles = {block.title for every in pages() for block in blocks(every)}
        assert script == "train.py" or script in titles, words
        return
    sources = [ROOT / script, *(ROOT / script).parent.rglob("*.py")]
    text = "\n".join(source.read_text("utf-8") for source in sources)
    for option in words[words.index(script) + 1 :]:
        assert not option.startswith("--") or f'"{option}"' in text, (words, option)


CHECKS: dict[str, Callable[[list[str], str], None]] = {
    "make ": check_make,
    "pip install ": check_pip,
    "python -m ldt ": check_ldt,
    "python benchmarks/": check_script,
    "torchrun ": check_script,
}
