"""The bond between the compiled module and one minor version of torch, and the errors when it is broken.

torch's C++ interface changes with every minor version: a module built against another one fails with a
missing symbol, or worse, with none. So the versions are compared before ldt._C is loaded.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec

REBUILD = "`pip install --no-deps --force-reinstall .` in ldt's source folder"


def built_against() -> str | None:
    """Version of the torch that ldt._C was built against (``2.13.0+cpu``), or None if ldt was never built."""
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
    """What to do, in one sentence, if a module built against one torch cannot run under another; else None."""
    if minor_of(built) == minor_of(installed):
        return None
    return (
        f"ldt was built against torch {built}, but torch {installed} is installed: "
        f"rebuild ldt with {REBUILD}, or install torch {minor_of(built)}.*."
    )


def require_torch() -> None:
    """Makes sure that ldt._C can be loaded here.

    Raises:
        ImportError: torch is missing, ldt was not built, or it was built against another minor version of
            torch. One sentence that says what to do.
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
    """Stands before the import of ldt._C, whoever asks for it, and lets it pass only if it can work.

    Without it an import that does not go by a name of ``ldt`` (``import ldt.runtime``) ends in a missing symbol.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds nothing itself. Raises ImportError, see require_torch."""
        if name == "ldt._C":
            require_torch()
        return None


def guard_core() -> None:
    """Puts the guard in place, once."""
    if not any(isinstance(finder, Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, Guard())
