"""connect(): from a topology and a running process group to a mesh, or one clear error on every rank."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ldt._torch_private import HashStore, default_store
from ldt.runtime.comm.transfer import TransferChoice, Transfers
from ldt.runtime.comm.transports import TransportChoice, check_transport
from ldt.runtime.common.device import choose_device
from ldt.runtime.health.failure_detector import HealthTimeouts
from ldt.runtime.health.fork_guard import check_world
from ldt.runtime.mesh.autotune import calibrate
from ldt.runtime.mesh.config import ConnectConfig, Timeouts
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.mesh.rendezvous import check_in, mesh_key, refuse
from ldt.topology import LanePolicy, Topology
from ldt.topology import lanes as lanes_of

__all__ = ["connect"]

logger = logging.getLogger(__name__)

_connecting: dict[int, int] = {}  # by process, which a fork may copy: the thread that connects


def connect(
    topology: Topology,
    backend: str | None = None,
    lanes: LanePolicy = "dedicated",
    *,
    transfer: TransferChoice = "leader",
    transport: TransportChoice = "auto",
    ranks: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    transfer_timeout: timedelta = timedelta(minutes=30),
    heartbeat_timeout: timedelta = HealthTimeouts.heartbeat,
    stall_timeout: timedelta = HealthTimeouts.stall,
    share_edge_errors: bool = False,
) -> Mesh:
    """Meet the other ranks of ``topology`` and connect everything that a step will use.

    Called after ``dist.init_process_group`` by every rank of the job. ``ranks[i]`` is the global rank that plays
    rank i of the topology; by default rank i itself, and then the topology must fill the world. ``backend`` and
    ``device`` default to those of the default process group. A topology of one rank needs no process group.
    A process connects one mesh at a time: meanwhile connect raises LdtError on its other threads, and on the ranks that
    come to meet those. Different threads may use a mesh each. In a process that a rank has forked, such
    as a worker of a DataLoader, every call of its mesh raises LdtError.

    ``transfer`` is how a message gets to the ranks of a stage: "leader" sends it from leader to leader and broadcasts
    it, "scatter" sends a share of it between each pair of ranks (the first min(tp) of both stages) and broadcasts
    those, "direct" sends from each rank to its peer all that it has where the stages are of one size (also where ranks
    have different tensors), "auto" is "leader" or, from the size on where that was measured to be faster, "scatter".
    With "direct" and "auto", chunks may return DTensors that are ``Shard`` over ``mesh.tp_mesh``: each rank sends parts
    straight to the ranks that need them. A dict is by link: ``{(0, 1): "leader", (1, 2): "direct"}``, others "leader".

    ``transport`` is what moves the bytes between GPUs. "copy_engine" writes into memory of the other process on the
    same host, with no kernel and no work of the host when a message's turn comes; "nccl" calls NCCL on the lane's own
    stream; "c10d" goes through process groups; "auto" takes the first that a lane can use (``mesh.transport_of``, and
    the log says why). On the CPU all is "c10d".

    ``timeout`` limits connecting, ``transfer_timeout`` one transfer within a step, counted from when it is its turn
    (on a device with streams: from when it was launched; through c10d by the backend's own means). A rank that gives no
    sign of life for ``heartbeat_timeout`` is taken for lost, also where no connection ends: its process is stopped, or
    its host gone. One that is in a call, waits for no other and does not get on for ``stall_timeout`` is taken to hang,
    as is one outside of any call for which others wait that long; after a minute, or half of that time, leaders log a
    picture of all nodes.

    A failure on a cloud rank is told to all with its text and traceback. Of one on the edge, whose text may quote a
    sample, cloud ranks learn the type of the exception, what the rank was doing and where it was raised; the text only
    of this package's own exceptions, which name shapes and figures, unless the edge has ``share_edge_errors=True``.

    Raises ValueError or TypeError for arguments that cannot be (the same on every rank), LdtError naming the ranks that
    did not come in time or came with another topology, and RemoteStageError if another rank failed while connecting.
    """
    check_world()
    lanes_of(topology, lanes)
    ranks = _check_ranks(topology, ranks)
    rank = ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    device = choose_device(device, backend)
    timeouts = Timeouts(timeout, transfer_timeout, heartbeat_timeout, stall_timeout)
    check_transport(transport, device)
    transfers = Transfers.of(topology, transfer)
    place = (ranks, rank, device)
    return _connect(
        ConnectConfig(topology, backend, lanes, transfers, transport, *place, timeouts, share_edge_errors)
    )


def _connect(config: ConnectConfig) -> Mesh:
    me = config.ranks[config.rank]
    store, key = _meeting_place(me, config.ranks)
    process, thread = os.getpid(), threading.get_ident()
    if _connecting.setdefault(process, thread) != thread:
        # To wait would be for ever where another rank has them in another order.
        refuse(
            store,
            key,
            f"rank {me} is connecting another mesh in another thread: connect meshes one after the other, in one order "
            "on all ranks; then each thread may use one",
        )
    try:
        return _meet(config, store, key, me)
    finally:
        _connecting.pop(process, None)


def _meet(config: ConnectConfig, store: Any, key: str, me: int) -> Mesh:
    seconds = config.timeouts.timeout.total_seconds()
    deadline = time.monotonic() + seconds
    check_in(store, key, me, config.ranks, config.settings, seconds)
    mesh = Mesh(config, store, key, partial(_connect, config))
    try:
        mesh.open(config, deadline)
        mesh.endpoints.update(calibrate(mesh, deadline))
    except BaseException as error:
        _give_up(mesh, error)
    logger.info("connected as %s", mesh)
    return mesh


def _give_up(mesh: Mesh, error: BaseException) -> NoReturn:
    try:
        mesh.fail(error, "connect")
    finally:
        mesh.close()


def _meeting_place(me: int, ranks: tuple[int, ...]) -> tuple[Any, str]:
    """The store, and the mesh's name there."""
    if dist.is_initialized():
        store = default_store()
        return store, mesh_key(store, me, ranks)
    return _private_store(), "ldt/alone"


def _check_ranks(topology: Topology, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The global ranks in topology order. Every rank of the job computes the same and raises the same."""
    initialized = dist.is_initialized()
    if not initialized and (topology.world_size > 1 or ranks not in (None, [0], (0,))):
        raise ValueError(
            f"topology {topology.to_text()} has {topology.world_size} ranks: "
            "call torch.distributed.init_process_group first"
        )
    world = dist.get_world_size() if initialized else 1
    if ranks is None:
        if world != topology.world_size:
            raise ValueError(
                f"topology {topology.to_text()} needs {topology.world_size} ranks, but WORLD_SIZE is {world}: "
                "start as many processes, change the topology, or name the ranks to use with ranks=[...]"
            )
        return tuple(range(world))
    ranks = tuple(ranks)
    if (
        len(ranks) != topology.world_size
        or len(set(ranks)) != len(ranks)
        or not set(ranks) <= set(range(world))
    ):
        raise ValueError(
            f"topology {topology.to_text()} needs {topology.world_size} different ranks of 0 to {world - 1}, "
            f"got ranks={list(ranks)}"
        )
    if initialized and dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not one of ranks={list(ranks)}: only those may call this connect"
        )
    return ranks


def _private_store() -> Any:
    """Where one rank that needs no others keeps what it publishes."""
    return HashStore()
