"""A compiler that links its own C++ runtime, as some machines have: g++ behind a wrapper with `-B`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["compiler_with_own_runtime"]


def compiler_with_own_runtime(folder: Path) -> Path | None:
    """Write the wrapper; its folder has the static archive and a dangling link. None without such a g++."""
    gxx = shutil.which("g++")
    if gxx is None:
        return None
    command = [gxx, "-print-file-name=libstdc++.a"]
    archive = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not archive.is_absolute():
        return None
    folder.mkdir()
    (folder / "libstdc++.a").symlink_to(archive)
    (folder / "libstdc++.so").symlink_to(folder / "nowhere" / "libstdc++.so.6")
    wrapper = folder / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {gxx} -B{folder}/ "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
