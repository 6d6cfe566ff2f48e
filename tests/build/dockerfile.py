"""Reads the Dockerfile: its stages, what they copy from the source tree, and the commands of pip that they run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/opt/ldt"  # the environment in the image


class Stage(NamedTuple):
    """A stage's base image, its name (empty for the last) and its instructions, in order."""

    base: str
    name: str
    instructions: list[tuple[str, str]]

    def all(self, keyword: str) -> list[str]:
        """The arguments of each instruction of this kind."""
        return [arguments for word, arguments in self.instructions if word == keyword]


def stages() -> list[Stage]:
    """Raises AssertionError for a line that is no instruction."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    found: list[Stage] = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        keyword, _, arguments = line.partition(" ")
        assert keyword in {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}, line
        if keyword == "FROM":
            base = re.fullmatch(r"(\S+)(?: AS (\S+))?", arguments)
            assert base, line
            found.append(Stage(base[1], base[2] or "", []))
        elif found:
            found[-1].instructions.append((keyword, arguments))
    return found


def copied() -> list[tuple[str, str]]:
    """Source and target of each file and folder that the build takes from the source tree."""
    (build,) = [stage for stage in stages() if stage.name == "build"]
    pairs = []
    for arguments in build.all("COPY"):
        *sources, target = arguments.split()
        pairs += [(source, target.replace("./", source)) for source in sources]
    return pairs


def copy_sources(folder: Path) -> None:
    """Copy to ``folder`` what the build stage has in its own."""
    for source, target in copied():
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.py")
            shutil.copytree(ROOT / source, folder / target, ignore=ignored)
        else:
            shutil.copy2(ROOT / source, folder / target)


def pip_commands(environment: Path) -> list[list[str]]:
    """The commands of pip that the build stage runs, for an environment elsewhere."""
    (build,) = [stage for stage in stages() if stage.name == "build"]
    runs = [command for command in build.all("RUN") if command.startswith(f"{PREFIX}/bin/pip ")]
    return [command.replace(PREFIX, str(environment)).split() for command in runs]
