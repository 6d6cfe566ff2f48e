"""Commands in the documents exist, with the options and values that they are given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from pages import ROOT, blocks, commands, is_run_elsewhere, pages, read
from programs import check_options, check_paths, make_targets, make_variables, program_of_target
from torch.distributed.run import get_args_parser

from ldt.cli import build_parser

_INLINE = re.compile(r"`((?:make|python benchmarks/|python -m ldt) ?[a-z][^`]*)`")


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_shell_block_is_known(page: str) -> None:
    for block in blocks(page):
        if block.language == "sh" and not is_run_elsewhere(block):
            for command in commands(block):
                check = next((check for start, check in CHECKS.items() if command.startswith(start)), None)
                assert check is not None, f"{page}:{block.line}: what checks {command!r}?"
                check(shlex.split(command))


@pytest.mark.parametrize("page", pages())
def test_every_command_in_prose_is_known(page: str) -> None:
    for command in _INLINE.findall(read(page)):
        words = shlex.split(command)
        if words[:3] == ["python", "-m", "ldt"]:  # without the arguments that it needs
            check_options(("-m", "ldt", words[3]), words[4:])
        else:
            check = next(check for start, check in CHECKS.items() if command.startswith(start))
            check(words)


def check_make(words: list[str]) -> None:
    """The target and the variables are in the Makefile, and ARGS are options of the program that gets them."""
    target, *assignments = words[1:]
    assert target in make_targets(), words
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        assert name in make_variables(), words
        if name == "ARGS":
            check_options(program_of_target(target), value.split())
            check_paths(value.split())


def check_pip(words: list[str]) -> None:
    """The extra is one of the package."""
    (what,) = words[2:]
    if what == "dist/ldt_torch-*.whl":  # of make wheel
        return
    section = read("pyproject.toml").split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    extras = re.findall(r"^([a-z]+) = \[", section, re.MULTILINE)
    assert what == "." or what.removeprefix(".[").removesuffix("]") in extras, words


def check_ldt(words: list[str]) -> None:
    """The command line is understood. Those that show their output are run in test_pages.py."""
    build_parser().parse_args(words[3:])
    check_options(("-m", "ldt", words[3]), words[4:])


def check_script(words: list[str]) -> None:
    """The script is in the repository and has the options, or is the program of a page."""
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    script, arguments = words[place], words[place + 1 :]
    if (ROOT / script).exists():
        check_options((script,), arguments)
    else:
        titles = {block.title for every in pages() for block in blocks(every)}
        assert script == "train.py" or script in titles, words


def check_torchrun(words: list[str]) -> None:
    """torchrun understands its own arguments, and the script or the module its."""
    parser = get_args_parser()
    parser.allow_abbrev = False
    parsed = parser.parse_args(words[1:])
    if parsed.module:
        check_ldt(["python", "-m", parsed.training_script, *parsed.training_script_args])
    else:
        check_script(words)


def check_copy(words: list[str]) -> None:
    """What is copied is in the repository."""
    assert (ROOT / words[-2]).exists(), words


def check_folder(words: list[str]) -> None:
    """A command of the same page makes it."""
    (folder,) = words[1:]
    assert any(command.endswith(f" {folder}") for command in _all_commands() if command != " ".join(words)), (
        words
    )


def check_copied_script(words: list[str]) -> None:
    """The script is a copy of one of the examples."""
    check_options((words[1].replace("build/", "examples/", 1),), words[2:])


def _all_commands() -> list[str]:
    return [command for page in pages() for block in blocks(page) for command in commands(block)]


def check_wg_quick(words: list[str]) -> None:
    """It brings up the tunnel of a file; test_tunnel.py does."""
    assert words[1] == "up", words
    assert words[2].endswith(".conf"), words


def check_docker(words: list[str]) -> None:
    """The Dockerfile has the arguments, and its last stage runs the default command."""
    given = [words[index + 1] for index, word in enumerate(words) if word == "--build-arg"]
    names = re.findall(r"^ARG (\w+)=", read("Dockerfile"), re.MULTILINE)
    assert {argument.partition("=")[0] for argument in given} <= set(names), words
    assert words[1] in {"build", "run"}, words


def check_outside_installer(words: list[str]) -> None:
    """uv and conda: their own options are theirs, requirements are distributions or this folder."""
    assert all(re.fullmatch(r"-{0,2}[\w-]+(==?[\d.]+)?|\.", word) for word in words[1:]), words


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make ": check_make,
    "pip install ": check_pip,
    "uv ": check_outside_installer,
    "conda ": check_outside_installer,
    "docker ": check_docker,
    "python -m ldt ": check_ldt,
    "python benchmarks/": check_script,
    "torchrun ": check_torchrun,
    "wg-quick ": check_wg_quick,
    "cp -r ": check_copy,
    "cp ": check_copy,
    "cd ": check_folder,
    "python build/two_sites/": check_copied_script,
}


@pytest.mark.parametrize(
    "command",
    [
        "make tests",
        "make build demo",
        "make demo ARG=--check",
        'make demo ARGS="--step 5"',
        'make test ARGS="tests/plans"',
        'make faults ARGS="--seed 17"',
        "pip install '.[plots]'",
        "docker build --build-arg DEVICES=cu130 -t ldt .",
        "uv pip install '.[hf]'; reboot",
        "python -m ldt doctors",
        "python -m ldt plan --stages 1,1 --microbatch 8",
        "python benchmarks/transfer.py --counts 15",
        "python benchmarks/transfers.py",
        "torchrun --nproc 3 train.py",
        "torchrun --standalone --nproc-per-node 3 examples/train_vlm.py --step 3",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    check = next(check for start, check in CHECKS.items() if command.startswith(start))
    with pytest.raises((AssertionError, SystemExit)):
        check(shlex.split(command))
