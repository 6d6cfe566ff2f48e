"""Meshes over each transport of lanes that is asked for."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from clock import total

import ldt

__all__ = [
    "TRANSPORTS",
    "connect",
    "connect_each",
    "connect_or_note",
    "device_of",
    "new_group",
    "note",
    "transports_of",
]

TRANSPORTS = {"cpu": ("c10d",), "cuda": ("c10d", "nccl", "copy_engine")}


def transports_of(arguments: argparse.Namespace) -> Sequence[str]:
    """Those of ``--transports``, or all that there are for the device."""
    return arguments.transports or TRANSPORTS[arguments.device]


def device_of(arguments: argparse.Namespace) -> torch.device:
    """This rank's."""
    return torch.device("cuda", dist.get_rank()) if arguments.device == "cuda" else torch.device("cpu")


def new_group(ranks: Sequence[int], device: torch.device) -> Any:
    """Of ``dist.new_group``, with the backend for ``device`` alone. Every rank of the world calls it."""
    return dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")


def note(text: str) -> None:
    """A line of context among the rows, once for all ranks."""
    if dist.get_rank() == 0:
        print(f"# {text}", flush=True)


def connect(topology: ldt.Topology, transport: str, device: torch.device, **options: Any) -> ldt.Mesh:
    """``ldt.connect`` over ``transport``; raises if a link got another one."""
    # TODO: pass transport= and call transport_of always, once ldt.connect and Mesh of this tree have them.
    if "transport" in inspect.signature(ldt.connect).parameters:
        options["transport"] = transport
    elif transport != "c10d":
        raise ValueError(f"transport {transport!r}: this ldt has process groups only, that is 'c10d'")
    mesh = ldt.connect(topology, device=device, **options)
    transport_of = getattr(mesh, "transport_of", lambda _: "c10d")
    got = {transport_of(channel) for channel in mesh.endpoints}
    if got - {transport}:
        mesh.close()
        raise RuntimeError(f"expected lanes over {transport!r}, got {sorted(got)}")
    return mesh


def connect_each(
    topology: ldt.Topology, arguments: argparse.Namespace, **options: Any
) -> Mapping[str, ldt.Mesh]:
    """A mesh over each of ``transports_of(arguments)`` that can be connected here, by its name."""
    meshes = {
        transport: connect_or_note(topology, transport, arguments, **options)
        for transport in transports_of(arguments)
    }
    return {transport: mesh for transport, mesh in meshes.items() if mesh is not None}


def connect_or_note(
    topology: ldt.Topology, transport: str, arguments: argparse.Namespace, **options: Any
) -> ldt.Mesh | None:
    """A mesh, or None and a note if it cannot be connected here.

    Raises instead for what ``--transports`` names, and for "c10d", which can always be.
    """
    mesh: ldt.Mesh | None = None
    why = "another rank could not connect"
    try:
        mesh = connect(topology, transport, device_of(arguments), **options)
    except Exception as error:
        if arguments.transports or transport == "c10d":
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    if not total(mesh is None):
        return mesh
    if mesh is not None:
        mesh.close()
    note(f"{transport} is left out: {why}")
    return None
