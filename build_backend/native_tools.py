"""Finds the programs of the native build, CMake and Ninja, and proves that they run.

A program on ``PATH`` may be the script of a Python package that the isolated build cannot import, so each
candidate is started once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

from find_torch import candidate_folders

MINIMUM = {"cmake": (3, 25), "ninja": (1, 10)}


def find_tool(name: str) -> str | None:
    """Path of a working program of at least the minimum version, or None."""
    for candidate in _candidates(name):
        version = _version(candidate)
        if version is not None and version >= MINIMUM[name]:
            return candidate
    return None


def require_tool(name: str) -> str:
    """Like find_tool, but raises SystemExit with one sentence if there is none."""
    tool = find_tool(name)
    if tool is None:
        wanted = ".".join(map(str, MINIMUM[name]))
        raise SystemExit(f"ldt: the build needs {name} >= {wanted} and found none; run `pip install {name}`.")
    return tool


def missing_requirements() -> list[str]:
    """Requirements for what this machine lacks, for the frontend of an isolated build to install."""
    return [
        f"{name}>={'.'.join(map(str, minimum))}"
        for name, minimum in MINIMUM.items()
        if find_tool(name) is None
    ]


def _candidates(name: str) -> list[str]:
    folders = [*os.get_exec_path(), sysconfig.get_path("scripts")]
    found = [str(Path(folder) / name) for folder in folders]
    # The PyPI packages of both carry them inside; those of the target are found in an isolated build, too.
    for package in (folder / name for folder in candidate_folders()):
        found += [str(package / "data" / "bin" / name), str(package / name)]
    return [path for path in dict.fromkeys(found) if os.access(path, os.X_OK) and Path(path).is_file()]


def _version(program: str) -> tuple[int, ...] | None:
    try:
        command = [program, "--version"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None
