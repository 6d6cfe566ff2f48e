"""Finds setuptools: in the build's own environment or, as an isolated build cuts ``sys.path``, in the target's.

The build environment of ``pip install .`` is empty at first. Where the target has a setuptools that is new enough, it
is used from there, and nothing is fetched.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from find_torch import candidate_folders

MINIMUM = 77


def missing_setuptools() -> list[str]:
    """The requirement for the frontend to install, if there is no setuptools that will do."""
    return [] if _folder() else [f"setuptools>={MINIMUM}"]


def require_setuptools() -> None:
    """Makes sure that ``import setuptools`` finds one. Raises SystemExit with one sentence if there is none."""
    folder = _folder()
    if folder is None:
        raise SystemExit(
            f"ldt: the build needs setuptools >= {MINIMUM}; run `pip install 'setuptools>={MINIMUM}'`."
        )
    if folder not in sys.path:
        sys.path.append(folder)


def _folder() -> str | None:
    """That of the setuptools on ``sys.path`` or, if there is none, of the first in the target that is new enough."""
    for path in (sys.path, [str(folder) for folder in candidate_folders()]):
        for found in metadata.distributions(name="setuptools", path=list(path)):
            major = re.match(r"\d+", found.version)
            if major and int(major[0]) >= MINIMUM:
                return str(found.locate_file(""))
    return None
