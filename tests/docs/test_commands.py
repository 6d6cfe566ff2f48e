"""Benchmarks that the documents tell to run exist and know the options that they are given."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    {
        command
        for document in (ROOT / "docs").glob("*.md")
        for command in re.findall(r"`python (benchmarks/[^`]*)`", document.read_text(encoding="utf-8"))
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
