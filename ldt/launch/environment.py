"""The environment of each rank of a site: torch's ``env://`` rendezvous, interfaces, what CUDA reads at its start."""

from __future__ import annotations

import os
import shlex

from ldt._cuda import DEFAULTS
from ldt.errors import LdtError
from ldt.launch.description import Description

__all__ = ["environments", "exports", "launched_environments"]

_INTERFACE = {"cpu": "GLOO", "cuda": "NCCL", "npu": "HCCL"}  # who opens connections for tensors of a device


def environments(description: Description, site: str) -> list[dict[str, str]]:
    """What each rank of ``site`` needs, whoever starts it, by local rank. Rank 0 keeps the store."""
    table = description.sites[site]
    address, port = description.store
    ranks = description.ranks_of(site)
    shared = {
        "WORLD_SIZE": str(description.topology.world_size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": table.interface,
        f"{_INTERFACE[table.device]}_SOCKET_IFNAME": table.interface,
        "LDT_JOB": str(description.path),
    }
    if table.device == "cuda":
        shared |= {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    return [{"RANK": str(rank), "LOCAL_RANK": str(local), **shared} for local, rank in enumerate(ranks)]


def launched_environments(description: Description, site: str, attempt: int) -> list[dict[str, str]]:
    """The same for ranks that a launcher starts, which keeps the store for them."""
    more = {
        "LDT_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",  # lines are shown as they come
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    found = environments(description, site)
    if len(found) > 1:
        more["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun
    return [{**own, **more} for own in found]


def exports(description: Description, site: str, index: int | None = None) -> str:
    """Lines for a shell that set the environment of each rank of ``site``, or of its rank ``index`` alone.

    Raises LdtError if there is no such rank, or if rank 0 is not where the store is.
    """
    if description.site_of(0) != description.host:
        raise LdtError(
            f"{description.path}: without a launcher rank 0 keeps the store, so the port belongs into "
            f"[sites.{description.site_of(0)}], got it in [sites.{description.host}]"
        )
    found = environments(description, site)
    if index is not None and not 0 <= index < len(found):
        raise LdtError(f"--print-env: {site} has the ranks 0 to {len(found) - 1}, counted there, got {index}")
    chosen = found if index is None else [found[index]]
    command = shlex.join(["python", *description.command_of(site)])
    return "\n".join(f"{_block(description, own)}\n# {command}" for own in chosen)


def _block(description: Description, own: dict[str, str]) -> str:
    rank = int(own["RANK"])
    node = description.topology.node_of(rank)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
    return "\n".join([f"# rank {rank}: stage {node.stage}, replica {node.replica}", *lines])
