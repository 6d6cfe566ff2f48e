"""Holds what chunks keep for the next chunk of their node, and the gradients that come back."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from ldt._C import VersionCounters
from ldt.errors import LdtError
from ldt.runtime.common.kept import check_taken, earlier_chunk
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.in_flight import own_memory
from ldt.topology import Topology

__all__ = ["KeptTensors"]

_Place = tuple[int, int]  # the chunk that keeps, microbatch


class KeptTensors:
    """The kept tensors of one step on one rank. Each is put once and taken once; a verified plan guarantees it."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._tensors: dict[_Place, list[Any]] = {}
        self._shared: dict[_Place, VersionCounters] = {}
        self._grads: dict[_Place, list[torch.Tensor | None]] = {}

    def put(self, chunk: int, microbatch: int, tensors: list[Any], copied: Container[int]) -> None:
        """``chunk`` keeps ``tensors``, fresh from ``detach``; those at the indices ``copied`` are copied in any case.

        Raises LdtError if no later chunk of the node takes them.
        """
        if tensors:
            check_taken(self._topology, chunk)
            shared = own_memory(tensors, copied)
            self._shared[chunk, microbatch] = VersionCounters([tensors[index] for index in shared])
            self._tensors[chunk, microbatch] = tensors

    def take(self, chunk: int, microbatch: int) -> list[torch.Tensor]:
        """Return what was kept for ``chunk``."""
        return self._tensors.pop(self._place(chunk, microbatch), [])

    def check_unchanged(self, chunk: int, microbatch: int) -> None:
        """Raise LdtError if the forward of ``chunk`` changed a tensor whose memory something else refers to."""
        place = self._place(chunk, microbatch)
        shared = self._shared.pop(place, None)
        if shared is not None and shared.first_changed() is not None:
            raise LdtError(
                f"chunk {chunk} changes a tensor in place that chunk {place[0]} kept (ldt.keep) for microbatch "
                f"{microbatch}, and something else refers to its memory: another output, a tensor that a module or "
                "hook keeps, or a graph that saved it. The unsplit model would change that as well, a split one does "
                "not: clone() the tensor in one of the two chunks"
            )

    def put_grads(
        self, chunk: int, microbatch: int, specs: HopSpecs, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Give back ``grads`` of the tensors taken by ``chunk``, one for each of their ``specs`` that requires one."""
        if not specs:
            return
        found = iter(grads)
        given = [next(found) if spec.requires_grad else None for spec in specs]
        detached = [None if grad is None else grad.detach() for grad in given]
        del given
        own_memory(detached)
        self._grads[self._place(chunk, microbatch)] = detached

    def take_grads(self, chunk: int, microbatch: int, specs: HopSpecs) -> list[torch.Tensor | None]:
        """Return the gradients of what ``chunk`` kept, which has ``specs``."""
        return self._grads.pop((chunk, microbatch)) if specs else []

    def clear(self) -> None:
        self._tensors.clear()
        self._shared.clear()
        self._grads.clear()

    def _place(self, chunk: int, microbatch: int) -> _Place:
        earlier = earlier_chunk(self._topology, chunk)
        return -1 if earlier is None else earlier, microbatch
