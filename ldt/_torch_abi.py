"""Checks that the compiled module was built against the installed minor version of torch.

torch's C++ interface changes with every minor version: a module built against another one fails with a missing
symbol or, worse, silently. So the versions are compared before ldt._C is loaded.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec

REBUILD = "`pip install --no-deps --force-reinstall .` in ldt's source folder"


def built_against() -> str | None:
    """Return the torch version that ldt._C was built against (``2.13.0+cpu``), or None if ldt was never built."""
    try:
        info = importlib.import_module("ldt._build_info")
    except ImportError:
        return None
    version: str = info.TORCH_VERSION
    return version


def minor_of(version: str) -> str:
    """``2.13.0+cpu`` -> ``2.13``."""
    return ".".join(version.split(".")[:2])


def mismatch(built: str, installed: str) -> str | None:
    """Return what to do if a module built against one torch cannot run under another; None if it can."""
    if minor_of(built) == minor_of(installed):
        return None
    return (
        f"ldt was built against torch {built}, but torch {installed} is installed: "
        f"rebuild ldt with {REBUILD}, or install torch {minor_of(built)}.*."
    )


def require_torch() -> None:
    """Check that ldt._C can be loaded.

    Raises:
        ImportError: if torch is missing, ldt was not built, or it was built against another minor version of
            torch. The text says what to do.
    """
    built = built_against()
    if built is None:
        raise ImportError(
            f"ldt's compiled module was not built here: run {REBUILD}, or, if it is installed, start Python in another "
            "folder than ldt's source.",
            name="ldt._C",
        )
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        wanted = f"torch=={minor_of(built)}.*"
        raise ImportError(
            f"ldt needs {wanted}, and no torch is installed: install it.", name="torch"
        ) from None
    reason = mismatch(built, torch.__version__)
    if reason is not None:
        raise ImportError(reason, name="ldt._C")


class Guard:
    """An import hook that checks the torch version before any import of ldt._C.

    Without it, an import that bypasses the names of ``ldt`` (``import ldt.runtime``) fails with a missing symbol.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find nothing. Raises ImportError, see require_torch."""
        if name == "ldt._C":
            require_torch()
        return None


def guard_core() -> None:
    """Install the guard, once."""
    if not any(isinstance(finder, Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, Guard())
