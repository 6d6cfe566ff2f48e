"""The page on two hosts: its files and commands, both sites on this host. And the store of each attempt of torchrun."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launchers import launch, two_free_ports
from pages import README, blocks, commands
from programs import output_of_three_ranks

PAGE, RELIABILITY = "docs/start/hosts.md", "docs/reliability.md"
SECONDS = 300


def text_of(page: str, word: str) -> str:
    """The only block of ``page`` with a title and with ``word`` in it."""
    (text,) = (block.text for block in blocks(page) if block.title and word in block.text)
    return text


def program() -> str:
    (text,) = (block.text for block in blocks(README) if block.language == "python")
    return text


def replaced(text: str, line: str, by: str) -> str:
    """``text`` with ``by`` in place of the line that begins with ``line``."""
    found, count = re.subn(rf"^{re.escape(line)}.*\n", lambda _: by, text, flags=re.MULTILINE)
    assert count == 1, line
    return found


def losses(text: str, prefix: str = "") -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{prefix}step")]


def test_both_commands_train_together(tmp_path: Path) -> None:
    *description, connects = text_of(PAGE, "job.connect").splitlines(keepends=True)
    train = replaced(program(), "topology = ldt.Topology(", "".join(description))
    train = replaced(train, "for step in range(60):", "for step in range(24):\n")
    (tmp_path / "train.py").write_text(replaced(train, "mesh = ldt.connect(", connects))
    job = text_of(PAGE, "script =")
    for theirs, ours in (
        ("10.0.0.1", "127.0.0.1"),
        ("10.0.0.2", "127.0.0.1"),
        ("wg0", "lo"),
        ("29500", str(two_free_ports())),
    ):
        assert theirs in job
        job = job.replace(theirs, ours)
    (tmp_path / "job.toml").write_text(job)
    found = [
        shlex.split(command)
        for block in blocks(PAGE)
        if block.language == "sh"
        for command in commands(block)
    ]
    assert [words[:6] for words in found] == [
        ["python", "-m", "ldt", "launch", "job.toml", "--site"] for _ in ("edge", "cloud")
    ]
    sites = [words[6:] for words in found]
    with launch(tmp_path / "job.toml", *sites[0]) as edge, launch(tmp_path / "job.toml", *sites[1]) as cloud:
        assert [edge.status(), cloud.status()] == [0, 0], edge.text + cloud.text
    shown = next(block.text for block in blocks(PAGE) if block.text.startswith("[edge]"))
    printed = "".join(line for line in edge.text.splitlines(True) if "waiting for" not in line)
    assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), edge.text
    assert losses(edge.text, "[edge 0] ")[-1] < 0.5 * losses(edge.text, "[edge 0] ")[0]
    assert "step" not in cloud.text  # losses stay on the edge


@pytest.mark.slow
def test_each_attempt_of_torchrun_has_its_part_of_the_store(tmp_path: Path) -> None:
    store = text_of(RELIABILITY, "PrefixStore")
    train = replaced(program(), "dist.init_process_group(", store)
    (tmp_path / "train.py").write_text(f"import os\n{train}")
    output = output_of_three_ranks(tmp_path, SECONDS)
    assert losses(output)[-1] < 0.5 * losses(output)[0]
