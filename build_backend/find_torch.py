"""Finds the torch of the environment that ldt is installed into, without importing it.

A build frontend that isolates the build cuts ``sys.path``, but still runs the interpreter of the target
environment: ``sys.prefix`` tells where the target's packages are. torch's version is read from
``torch/version.py`` as text.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

NO_TORCH = (
    "ldt: there is no torch in {prefix}: ldt is compiled against the torch that it will run with, so install torch "
    "in your environment first and build there (`pip install .`, `uv pip install --no-build-isolation .`, or "
    "`python -m build --no-isolation`)."
)


class Torch(NamedTuple):
    """A torch package on disk: its folder and its version (such as ``2.13.0+cpu``)."""

    folder: Path
    version: str

    @property
    def requirement(self) -> str:
        """What a wheel built against this torch requires: the C++ interface changes with each minor version."""
        major, minor = self.version.split(".")[:2]
        return f"torch=={major}.{minor}.*"


def candidate_folders() -> list[Path]:
    """Folders that may hold the target's packages, best first."""
    folders = [Path(entry) for entry in sys.path if entry]  # complete when the build is not isolated
    prefixes = [sys.prefix]
    if _sees_system_packages():
        prefixes.append(sys.base_prefix)
    for prefix in prefixes:
        for scheme in (None, "posix_prefix", "venv"):
            for key in ("purelib", "platlib"):
                folders.append(_scheme_folder(key, scheme, prefix))
        folders.append(Path(prefix) / "lib" / "python3" / "dist-packages")  # Debian's own packages
    if sys.prefix == sys.base_prefix or _sees_system_packages():
        folders.append(Path(site.getusersitepackages()))
    return list(dict.fromkeys(folders))


def find_torch() -> Torch:
    """The target's torch. Raises SystemExit with one sentence if there is none.

    ``LDT_TORCH_DIR`` (a torch package folder) overrides the search.
    """
    override = os.environ.get("LDT_TORCH_DIR")
    folders = [Path(override)] if override else [folder / "torch" for folder in candidate_folders()]
    for folder in folders:
        version = read_version(folder / "version.py")
        if version is not None:
            return Torch(folder.resolve(), version)
    if override:
        raise SystemExit(f"ldt: LDT_TORCH_DIR is {override}, which is not an installed torch package folder.")
    raise SystemExit(NO_TORCH.format(prefix=sys.prefix))


def read_version(version_py: Path) -> str | None:
    """The version that a ``torch/version.py`` states, or None if there is no such file or statement."""
    try:
        text = version_py.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"""^__version__\s*(?::[^=]+)?=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return match.group(1) if match else None


def _scheme_folder(key: str, scheme: str | None, prefix: str) -> Path:
    variables = {"base": prefix, "platbase": prefix}
    if scheme is None or scheme not in sysconfig.get_scheme_names():
        return Path(sysconfig.get_path(key, vars=variables))
    return Path(sysconfig.get_path(key, scheme, vars=variables))


def _sees_system_packages() -> bool:
    """Whether the target is a virtual environment that also sees the packages of its base interpreter."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"(?mi)^include-system-site-packages\s*=\s*true", text) is not None
