"""Runs a job of two processes, of which the second may die, and returns the output of the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["first_of_two"]


def first_of_two(job: str, folder: Path, *arguments: str, seconds: float = 90) -> str:
    """Run the program ``job`` as ranks 0 and 1, given rank and ``arguments``. Returns the output of rank 0."""
    script = folder / "job.py"
    script.write_text(job)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, complaint = ranks[0].communicate(timeout=seconds)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[0].returncode == 0, complaint
    return said
