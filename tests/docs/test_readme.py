"""The README works as written: its program runs, its commands and its files exist."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

from pages import ROOT, read
from programs import check_options, make_targets, output_of_three_ranks, program_of_target

README = read("README.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_program_trains(tmp_path: Path) -> None:
    (program,) = blocks("python")
    assert len(program.splitlines()) <= 30
    (tmp_path / "train.py").write_text(program)
    output = output_of_three_ranks(tmp_path, 800)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) > 5
    assert losses[-1] < 0.5 * losses[0]


def test_the_program_for_gpus_is_this_one_on_devices() -> None:
    """tests/gpu runs it; here its lines are compared with the program above, except where they name a device."""
    (program,) = blocks("python")
    (on_gpus,) = re.findall(r"```python title=.*?\n(.*?)```", read("docs/start/gpus.md"), re.DOTALL)
    lines = list(difflib.ndiff(program.splitlines(), on_gpus.splitlines()))
    added, removed = ([line for line in lines if line[0] == sign] for sign in "+-")
    assert added
    assert all(re.search(r"device|cuda|import os|tp=\[1, 1\]", line) for line in added), added
    replaced = r"import torch|init_process_group|tp=|chunks\[index\]|torch\.rand|chunks = "
    assert all(re.search(replaced, line) for line in removed), removed
    assert len(added) - len(removed) <= 2, "more than a device is chosen"


def test_every_make_target_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named
    assert named <= make_targets()


def test_every_file_that_it_names_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_options_of_the_demo_exist() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if "ARGS=" in line]
    assert commands
    for command in commands:
        check_options(program_of_target("demo"), shlex.split(command)[2].split("=", 1)[1].split())
