"""The programs that the documents name: options by their help, targets and variables by the Makefile; and a run."""

from __future__ import annotations

import functools
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from pages import ROOT, read

from ldt.testing import RankPool

__all__ = ["check_options", "check_paths", "make_targets", "make_variables", "program_of_target"]

# What each target of make passes ARGS to.
_PROGRAMS = {
    "demo": ("examples/train_text.py",),
    "differential": ("-m", "differential"),
    "faults": ("-m", "faults"),
    "matrix": ("tests/build/install_matrix.py",),
    "slow": ("-m", "pytest"),
    "test": ("-m", "pytest"),
    "wheel": ("build_backend/make_wheel.py",),
}


def program_of_target(target: str) -> tuple[str, ...]:
    """Return the arguments of python for the program that gets ARGS. Raises AssertionError if none is known."""
    assert target in _PROGRAMS, f"make {target}: which program gets its ARGS?"
    return _PROGRAMS[target]


def make_targets() -> set[str]:
    """Return the targets that the Makefile declares as such."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    return set(phony.split())


def make_variables() -> set[str]:
    """Return the variables that a caller of make may set."""
    return set(re.findall(r"^([A-Z_]+) \?=", read("Makefile"), re.MULTILINE))


def check_options(program: tuple[str, ...], words: list[str]) -> None:
    """Every option among ``words`` is one of the program, spelled out."""
    options = {word.split("=")[0] for word in words if re.match("-+[a-zA-Z]", word)}
    unknown = options - _options_of(program) if options else set()
    assert not unknown, f"{' '.join(program)} has no {unknown}"


def check_paths(words: list[str]) -> None:
    """Every word that looks like a path of the repository is one."""
    for word in words:
        assert "/" not in word or word.startswith("-") or (ROOT / word.split("::")[0]).exists(), word


@functools.cache
def _options_of(program: tuple[str, ...]) -> set[str]:
    with RankPool(1) as process:  # forked from one that has imported torch
        (printed,) = process.run(_help, program)
    declared = re.findall(r"^ +(-.*?)(?:  |$)", printed, re.MULTILINE)
    return {option for line in declared for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w.-]*", line)}


def _help(program: tuple[str, ...]) -> str:
    """Return what ``python *program --help`` prints, for a process that ends after it."""
    is_module = program[0] == "-m"
    run: Callable[..., object] = runpy.run_module if is_module else runpy.run_path
    name, *arguments = program[is_module:]
    folder = ROOT if is_module else (ROOT / name).parent
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "200"
    sys.path[:0] = map(str, [folder, ROOT, ROOT / "tests"])
    sys.argv = [name, *arguments, "--help"]
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        run(name, run_name="__main__")
    assert not ended.value.code
    return printed.getvalue()


def output_of_three_ranks(folder: Path, seconds: float) -> str:
    """Run ``train.py`` in ``folder`` with three ranks of torchrun. Returns what they print; they must succeed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "train.py",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
