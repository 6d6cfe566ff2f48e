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

__all__ = ["TRANSPORTS", "connect", "connect_each", "device_of", "new_group", "note"]

TRANSPORTS = {"cpu": ("c10d",), "cuda": ("c10d", "nccl", "copy_engine")}


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
    """A mesh over each of ``--transports``, by its name.

    Without that option, one other than "c10d" that cannot be connected here is told in a note and left out.
    """
    meshes: dict[str, ldt.Mesh] = {}
    for transport in arguments.transports or TRANSPORTS[arguments.device]:
        error: Exception | None = None
        try:
            mesh = connect(topology, transport, device_of(arguments), **options)
        except Exception as caught:
            if arguments.transports or transport == "c10d":
                raise
            error = caught
        if not total(error is not None):
            meshes[transport] = mesh
            continue
        if error is None:
            mesh.close()  # it is others that could not
        why = f"{type(error).__name__}: {error}" if error is not None else "another rank could not connect"
        note(f"{transport} is left out: {why.splitlines()[0]}")
    return meshes
