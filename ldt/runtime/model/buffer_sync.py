"""Broadcasts buffers from the first replica before each call, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ldt._torch_private import non_persistent_buffers
from ldt.errors import LdtError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.data_parallel import unwrapped
from ldt.runtime.model.initial_weights import broadcast, check_writable
from ldt.runtime.model.module_state import sharded_over

__all__ = ["BufferSync"]


class BufferSync:
    """Broadcasts the buffers of ``modules`` from the first replica to the others.

    A module in DistributedDataParallel broadcasts all its buffers, unless it has ``broadcast_buffers=False``. With
    ``plain``, other modules broadcast the buffers in their ``state_dict``, such as the running statistics of
    BatchNorm, but not computed constants. Raises LdtError for a buffer that cannot be written.
    """

    def __init__(self, mesh: Mesh, modules: Iterable[nn.Module], plain: bool) -> None:
        self._mesh = mesh
        modules = [module for module in modules if plain or isinstance(module, DistributedDataParallel)]
        found = (
            [owned for module in modules for owned in _buffers_of(module)]
            if mesh.dp_group is not None
            else []
        )
        self._owned = dict.fromkeys(found)
        for owner, name in self._owned:
            buffer = owner._buffers[name]
            if buffer is not None and not is_lazy(buffer):
                label = f"buffer {name} of a {type(owner).__name__}"
                check_writable(label, buffer, "sync_buffers (DDP: broadcast_buffers)")
        self._sizes = {id(owner): dict(_shapes(owner)) for owner, _ in self._owned}

    def run(self) -> None:
        """Broadcast all buffers in one message. A collective call of the replicas, made before each pipeline call."""
        tensors: dict[int, torch.Tensor] = {}
        for owner, name in self._owned:
            buffer = owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401
            known = self._sizes[id(owner)].get(name)
            if (None if buffer is None else buffer.shape) != known:
                raise LdtError(
                    f"buffer {name} of a {type(owner).__name__} changed its shape from {known and list(known)}, so it "
                    "cannot be broadcast to the other replicas: pass Pipeline(sync_buffers=False) (DDP: "
                    "broadcast_buffers=False), or keep it out of the state_dict (persistent=False)"
                )
            if buffer is not None and not sharded_over(buffer, self._mesh.rank_info)[1]:
                tensors[id(buffer)] = buffer
        if tensors:
            broadcast(
                list(tensors.values()), self._mesh.dp_group, self._mesh, "the buffers of the first replica"
            )


def _buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    ignored: Collection[Any] = ()
    wrapped = isinstance(module, DistributedDataParallel)
    if isinstance(module, DistributedDataParallel):
        if not module.broadcast_buffers:
            return
        ignored = module.parameters_to_ignore
    for path, owner in unwrapped(module).named_modules():
        for name, buffer in owner._buffers.items():  # TorchScript's _buffers has neither iteration nor get()
            kept = wrapped or name not in non_persistent_buffers(owner)
            if buffer is not None and kept and f"{path}.{name}".removeprefix(".") not in ignored:
                yield owner, name


def _shapes(owner: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    return ((name, buffer.shape) for name, buffer in owner._buffers.items() if buffer is not None)
