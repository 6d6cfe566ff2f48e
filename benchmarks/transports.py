"""Connects a mesh for each requested transport."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from clock import total

import ldt
from ldt.runtime.comm.transports import TransportChoice

__all__ = [
    "TRANSPORTS",
    "by_network",
    "connect",
    "connect_each",
    "connect_or_note",
    "device_of",
    "made_or_noted",
    "new_group",
    "note",
    "transports_of",
]


class Closable(Protocol):
    def close(self) -> object: ...


Ends = TypeVar("Ends", bound=Closable)
TRANSPORTS: Mapping[str, Sequence[TransportChoice]] = {
    "cpu": ("c10d",),
    "cuda": ("c10d", "nccl", "host", "copy_engine"),
}


def transports_of(arguments: argparse.Namespace) -> Sequence[TransportChoice]:
    """Return the transports of ``--transports``, or all that the device supports."""
    chosen: Sequence[TransportChoice] = arguments.transports or TRANSPORTS[arguments.device]
    return chosen


def by_network(arguments: argparse.Namespace) -> Sequence[TransportChoice]:
    """Return the transports of ``--transports``, or all network transports. Raises ValueError for any other."""
    possible = [name for name in TRANSPORTS[arguments.device] if name != "copy_engine"]
    chosen: Sequence[TransportChoice] = getattr(arguments, "transports", None) or possible
    if "copy_engine" in chosen:
        raise ValueError(
            f"expected transports that go through a network ({', '.join(possible)}), got copy_engine, which goes "
            "through the memory of one host"
        )
    return chosen


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", dist.get_rank()) if arguments.device == "cuda" else torch.device("cpu")


def new_group(ranks: Sequence[int], device: torch.device) -> Any:
    """Like ``dist.new_group``, with only the backend for ``device``. Every rank of the world calls it."""
    return dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")


def note(text: str) -> None:
    """Report a line of context among the rows, once for all ranks."""
    if dist.get_rank() == 0:
        print(f"# {text}", flush=True)


def connect(
    topology: ldt.Topology, transport: TransportChoice, device: torch.device, **options: Any
) -> ldt.Mesh:
    """Call ``ldt.connect`` with ``transport``; raises if a link got another one that "host" is not for."""
    mesh = ldt.connect(topology, device=device, transport=transport, **options)
    got = {mesh.transport_of(channel) for channel in mesh.endpoints}
    if got - {transport} - ({"copy_engine"} if transport == "host" else set()):
        mesh.close()
        raise RuntimeError(f"expected lanes over {transport!r}, got {sorted(got)}")
    return mesh


def connect_each(
    topology: ldt.Topology, arguments: argparse.Namespace, **options: Any
) -> Mapping[str, ldt.Mesh]:
    """Return a mesh over each of ``transports_of(arguments)`` that can be connected here, by its name."""
    meshes = {
        transport: connect_or_note(topology, transport, arguments, **options)
        for transport in transports_of(arguments)
    }
    return {transport: mesh for transport, mesh in meshes.items() if mesh is not None}


def connect_or_note(
    topology: ldt.Topology, transport: TransportChoice, arguments: argparse.Namespace, **options: Any
) -> ldt.Mesh | None:
    """Return a mesh, or None with a note if it cannot be connected here."""
    device = device_of(arguments)
    return made_or_noted(lambda: connect(topology, transport, device, **options), transport, arguments)


def made_or_noted(
    make: Callable[[], Ends], transport: TransportChoice, arguments: argparse.Namespace
) -> Ends | None:
    """Return the result of ``make``, or None with a note if it fails on any rank.

    For a transport named in ``--transports``, and for "c10d", which always works, it raises instead.
    """
    made: Ends | None = None
    why = "another rank could not connect"
    try:
        made = make()
    except Exception as error:
        if arguments.transports or transport == "c10d":
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    if not total(made is None):
        return made
    if made is not None:
        made.close()
    note(f"{transport} is left out: {why}")
    return None
