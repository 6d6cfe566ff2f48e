"""Protects a rank's process groups in forked children, such as DataLoader workers."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch.distributed as dist

from ldt._torch_private import groups_and_stores
from ldt.errors import LdtError

__all__ = ["check_process", "check_world"]

_inherited: dict[Any, int] = {}  # process group to the process that created it


def check_process(what: str, process: int) -> None:
    """Raise LdtError unless this is ``process``, the owner of ``what``."""
    if process != os.getpid():
        raise LdtError(
            f"{what} belongs to process {process}, this is process {os.getpid()}, a forked child: use it where it was "
            "made, or start processes with the method 'spawn' or 'forkserver'"
        )


def check_world() -> None:
    """Raise LdtError if this forked process inherited the default process group from its parent."""
    world = dist.group.WORLD if dist.is_initialized() else None
    check_process("the default process group", _inherited.get(world, os.getpid()))


def _inherit() -> None:
    """Keep inherited groups and stores alive for good: their destructors join threads that a child does not have."""
    for group, store in list(groups_and_stores()):
        if group not in _inherited:
            _inherited[group] = os.getppid()
            for kept in (group, store):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_inherit)
