"""Messages as lanes carry them. What a stripe carries of a tensor is packed by itself, if the link has compression.

So shares that the ranks of a stage send, and the pieces of a shard, can be unpacked where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ldt.runtime.comm.compression import pack, packs, unpack, wire_bytes
from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["Arrival", "pack_message", "receive_message"]


@dataclass
class Arrival:
    """A message on its way. ``unpack()``, called once and after the work, returns its tensors."""

    work: CompositeWork
    unpack: Callable[[], list[torch.Tensor]]


def pack_message(endpoint: Endpoint, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> Parts:
    """The parts that this rank sends of ``tensors``. Parts that are not packed share their memory."""
    scheme = endpoint.scheme
    wire = [spec.to_wire(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
    return {
        stripe: [pack(scheme, tensor) if packs(scheme, spec) else tensor for tensor, spec in part]
        for stripe, part in endpoint.parts(wire, specs).items()
        if stripe in endpoint.stripes
    }


def receive_message(
    endpoint: Endpoint,
    specs: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    label: str,
) -> Arrival:
    """Start to receive this rank's tensors, of ``shapes`` in memory order."""
    if endpoint.is_in_pieces(specs, shapes):
        arrival = _receive_pieces(endpoint, specs, shapes, device, label)
    else:
        arrival = _receive_whole(endpoint, specs, shapes, label)
    return Arrival(
        arrival.work,
        lambda: [spec.from_wire(tensor) for spec, tensor in zip(specs, arrival.unpack(), strict=True)],
    )


def _receive_whole(
    endpoint: Endpoint, specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]], label: str
) -> Arrival:
    """One lane writes to buffers of its pool. Packed tensors are unpacked to memory that is allocated then."""
    scheme = endpoint.scheme
    packed = [packs(scheme, spec) for spec in specs]
    wire = endpoint.lane.buffers(
        [
            [wire_bytes(scheme, spec, shape)] if is_packed else list(shape)
            for spec, shape, is_packed in zip(specs, shapes, packed, strict=True)
        ],
        [torch.uint8 if is_packed else spec.dtype for spec, is_packed in zip(specs, packed, strict=True)],
    )

    def tensors() -> list[torch.Tensor]:
        found = list(wire)
        for index in (index for index, is_packed in enumerate(packed) if is_packed):
            found[index] = wire[index].new_empty(list(shapes[index]), dtype=specs[index].dtype)
            unpack(scheme, wire[index], found[index])
        return found

    return Arrival(endpoint.receive(wire, label), tensors)


def _receive_pieces(
    endpoint: Endpoint,
    specs: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    label: str,
) -> Arrival:
    """Several lanes write to a tensor. A packed piece has a buffer, and is unpacked to its place."""
    scheme = endpoint.scheme
    targets = [
        torch.empty(list(shape), dtype=spec.dtype, device=device)
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []
    parts: Parts = {}
    for stripe, part in endpoint.parts(targets, specs).items():
        parts[stripe] = wire = []
        for view, spec in part:
            if packs(scheme, spec):
                nbytes = wire_bytes(scheme, spec, view.shape)
                wire.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
                packed.append((wire[-1], view))
            else:
                wire.append(view)

    def tensors() -> list[torch.Tensor]:
        for buffer, view in packed:
            unpack(scheme, buffer, view)
        return targets

    return Arrival(endpoint.receive_parts(parts, label), tensors)
