"""What every hop of a step will carry: asked once of the chunks, agreed on by all ranks, and remembered."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.inference import infer_specs, warm_up
from ldt.runtime.mesh import Mesh
from ldt.runtime.specs import HopSpecs, TensorSpec, describe

__all__ = ["ShapeBook"]

Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """The ``size`` answers used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, ask: Callable[[], Value]) -> Value:
        """The answer for ``key``, from ``ask`` if it is not there."""
        if key not in self._answers:
            self._answers[key] = ask()
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return self._answers[key]

    def clear(self) -> None:
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)


class ShapeBook:
    """The specs of hops c -> c+1 for every microbatch of a step, the same on all ranks.

    The edge says what hop 0 carries, and in which setting; for specs not met before in that one, each chunk's leader
    infers its output and tells all. Answers are kept until ``forget``, the most recent 256 of the head and 1024
    of the other chunks. Hops within a node are found by the way and have no specs here.
    """

    def __init__(self, mesh: Mesh, chunks: Mapping[int, nn.Module]) -> None:
        self._mesh = mesh
        self._topology = mesh.topology
        self._chunks = chunks
        if mesh.topology.channels:
            warm_up()
        self._heads: _Recent[HopSpecs] = _Recent(256)
        self._outputs: _Recent[HopSpecs] = _Recent(1024)

    def autocast(self) -> str | None:
        """The dtype that autocast casts to on this rank's device, None where it is off."""
        kind = self._mesh.device.type
        return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def setting(self) -> str:
        """What may give one input other shapes: autocast, and which modules are in train mode.

        The edge's stands for that of all ranks, as both are switched everywhere between the same two steps.
        """
        modes = bytes(part.training for chunk in self._chunks.values() for part in chunk.modules())
        return f"autocast={self.autocast()} modes={hashlib.sha256(modes).hexdigest()[:16]}"

    def forget(self) -> None:
        """Infer everything anew from the next step on. To be called on all ranks between the same two steps."""
        self._heads.clear()
        self._outputs.clear()

    def head_output(
        self, signature: object, args: Sequence[Any], kwargs: dict[str, Any], training: bool, setting: str
    ) -> HopSpecs:
        """What hop 0 carries for these arguments of the head. Edge only, local."""
        if not self._topology.crosses(0):
            return ()
        key = (signature, training, setting)
        return self._heads.get(key, lambda: self._infer(0, args, kwargs, training))

    def hops(self, first: HopSpecs, replica: int, training: bool, setting: str) -> list[HopSpecs]:
        """What each hop carries when hop 0 carries ``first`` in ``replica``. A collective call of all ranks.

        ``setting`` is the edge's, so that all ask again when it changes.
        """
        hops = [first]
        for chunk in range(1, self._topology.tail):
            if self._topology.crosses(chunk):
                hops.append(self._output(chunk, hops[-1], replica, training, setting))
            else:
                hops.append(())
        for hop, specs in enumerate(hops):
            self._check_split(hop, specs, replica)
        return hops

    def _check_split(self, hop: int, specs: HopSpecs, replica: int) -> None:
        """Raise LdtError where tensors are split over ranks and the strands of their link are not for that."""
        split = [spec for spec in specs if spec.shard is not None]
        if split and not self._mesh.transfers.can_split(self._topology.channel(hop, "F", replica)):
            raise LdtError(
                f"chunk {hop} returns {describe(split)}, which this link has no way to carry: connect with "
                'transfer="direct" or "auto", for all links or for this one, or let the chunk return full_tensor()'
            )

    def _infer(self, chunk: int, args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> HopSpecs:
        mesh = self._mesh
        return infer_specs(chunk, self._chunks[chunk], args, kwargs, mesh.device, training, mesh.shards)

    def _output(self, chunk: int, inputs: HopSpecs, replica: int, training: bool, setting: str) -> HopSpecs:
        key = (chunk, inputs, training, setting)
        return self._outputs.get(key, lambda: self._ask(chunk, inputs, replica, training))

    def _ask(self, chunk: int, inputs: HopSpecs, replica: int, training: bool) -> HopSpecs:
        """The chunk's own ranks infer; its leader's word goes to all."""
        node = self._topology.node_at(chunk, replica)
        mine = None
        if node == self._mesh.node:
            mine = self._infer(chunk, inputs, {}, training)
        message = None if mine is None else [spec.to_json() for spec in mine]
        answer = self._mesh.control.broadcast(message, self._topology.leader_of(node))
        agreed = tuple(map(TensorSpec.from_json, answer))
        if mine is not None and mine != agreed:
            raise LdtError(
                f"the ranks of node {node} disagree on what chunk {chunk} returns: its leader says "
                f"{describe(agreed)}, rank {self._mesh.ranks[self._mesh.rank]} says {describe(mine)}; "
                "they must hold equal modules"
            )
        return agreed
