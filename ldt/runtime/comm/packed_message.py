"""Messages as lanes carry them. With compression, every part that a stripe carries is packed by itself.

So what the ranks of a stage send a share of each, and the pieces of a shard, can be unpacked where they arrive.
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
    """The parts that this rank sends, for ``Endpoint.send_parts``. ``tensors`` are in memory order."""
    scheme = endpoint.scheme
    return {
        stripe: [pack(scheme, tensor) if packs(scheme, spec) else tensor for tensor, spec in part]
        for stripe, part in endpoint.parts(tensors, specs).items()
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
    receive = _receive_plain
    if any(packs(endpoint.scheme, spec) for spec in specs):
        receive = _receive_pieces if endpoint.is_in_pieces(specs, shapes) else _receive_whole
    arrival = receive(endpoint, specs, shapes, device, label)
    return Arrival(
        arrival.work,
        lambda: [spec.from_wire(tensor) for spec, tensor in zip(specs, arrival.unpack(), strict=True)],
    )


def _receive_plain(
    endpoint: Endpoint,
    specs: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    label: str,
) -> Arrival:
    wire = endpoint.buffers(specs, shapes, device)
    return Arrival(endpoint.receive(wire, label, specs), lambda: wire)


def _receive_whole(
    endpoint: Endpoint,
    specs: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    label: str,
) -> Arrival:
    """One lane writes to packed buffers of its pool; tensors are made when they have arrived."""
    scheme = endpoint.scheme
    sizes = [
        ([wire_bytes(scheme, spec, shape)], torch.uint8) if packs(scheme, spec) else (list(shape), spec.dtype)
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    wire = endpoint.lane.buffers([size for size, _ in sizes], [dtype for _, dtype in sizes])

    def tensors() -> list[torch.Tensor]:
        found = []
        for buffer, spec, shape in zip(wire, specs, shapes, strict=True):
            target = buffer
            if packs(scheme, spec):
                target = torch.empty(list(shape), dtype=spec.dtype, device=device)
                unpack(scheme, buffer, target)
            found.append(target)
        return found

    return Arrival(endpoint.receive(wire, label), tensors)


def _receive_pieces(
    endpoint: Endpoint,
    specs: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    label: str,
) -> Arrival:
    """Several lanes write to a tensor: each part has a buffer, and is unpacked to its place."""
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
