"""connect(): connects the ranks of a topology into a mesh, or raises one clear error on every rank."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from ldt._torch_private import HashStore, default_store
from ldt.runtime.comm.compression import CompressionChoice, Compressions
from ldt.runtime.comm.socket_links import Connections
from ldt.runtime.comm.socket_options import MAX_CONNECTIONS
from ldt.runtime.comm.transfer_modes import TransferChoice, Transfers
from ldt.runtime.comm.transports import TransportChoice, check_transport
from ldt.runtime.common.device import choose_device
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health.failure_detector import HealthTimeouts
from ldt.runtime.health.fork_guard import check_world
from ldt.runtime.health.store_connection import StoreConnection
from ldt.runtime.mesh.autotune import tune_transfers
from ldt.runtime.mesh.config import ConnectConfig, Timeouts
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.mesh.reachability import Hosts, facts_of
from ldt.runtime.mesh.rendezvous import answering, ask, check_in, mesh_key, refuse
from ldt.topology import LanePolicy, Topology
from ldt.topology import lanes as lanes_of

__all__ = ["connect"]

logger = logging.getLogger(__name__)

_LATER_SECONDS = 2.0  # than the watchdog gives up the store: it knows more of why

_connecting: dict[int, int] = {}  # the connecting thread, by process, as a fork copies this


def connect(
    topology: Topology,
    backend: str | None = None,
    lanes: LanePolicy = "dedicated",
    *,
    transfer: TransferChoice = "leader",
    transport: TransportChoice = "auto",
    compression: CompressionChoice = "none",
    ranks: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    transfer_timeout: timedelta = timedelta(minutes=30),
    heartbeat_timeout: timedelta = HealthTimeouts.heartbeat,
    stall_timeout: timedelta = HealthTimeouts.stall,
    outage: timedelta = HealthTimeouts.outage,
    share_edge_errors: bool = False,
    connections: Connections | None = None,
) -> Mesh:
    """Connect the ranks of ``topology`` into a mesh. A collective call of these ranks.

    Call it after ``torch.distributed.init_process_group``; a topology of one rank needs no process group. A process
    connects one mesh at a time: meanwhile connect raises LdtError on other threads, and on the ranks that wait for
    those. The guides "Unequal stages", "On two GPUs" and "Checkpoints and failures" help to choose arguments.

    Args:
        topology: The ranks of each stage, the replicas and the laps.
        backend: Backend of the process groups. Default: that of the default process group.
        lanes: ``"dedicated"`` gives each channel a lane; ``"paired"`` has two for each replica, four
            if the number of stages is odd.
        transfer: How a message reaches the ranks of a stage: ``"leader"``, ``"scatter"``, ``"direct"`` or ``"auto"``,
            or a dict of these by link, as ``{(0, 1): "leader", (1, 2): "direct"}``; other links use ``"leader"``.
        transport: What moves bytes between GPUs: ``"copy_engine"``, ``"host"``, ``"nccl"``, ``"c10d"``, or ``"auto"``
            for the first of these that a lane can use. ``"host"`` is for lanes between sites, over ``connections``
            between their hosts; others are chosen as by ``"auto"``. Without a copy engine, as on an NPU, a rank that
            waits for a message then waits on the host. On the CPU always c10d.
        compression: How tensors that require a gradient, and their gradients, are packed on links between sites:
            ``"none"``, ``"bf16"`` or ``"8bit"``, or a dict by link, as ``{(0, 1): ldt.Compression(activations="8bit",
            gradients="bf16")}``; other links pack nothing. Results then differ from the unsplit model's by rounding.
        ranks: ``ranks[i]`` is the global rank of rank i of the topology. Default: i; the topology then fills the world.
        device: Device of chunks and samples. Default: that of the default process group.
        timeout: Limit for connecting.
        transfer_timeout: Limit for one transfer within a step.
        heartbeat_timeout: Silence after which a rank is taken for dead. At least 1 s.
        stall_timeout: Time without progress after which a rank is taken for hung.
        outage: How long links between sites may be down while the job goes on. As TCP may take as long again to notice
            that a link is back, all other limits for silence and for closing grow by twice as much. Default: 0.
        share_edge_errors: Publish text and traceback of all errors of the edge, which may quote a sample.
        connections: Number of TCP connections, 1 to 64, between two ranks on different sites, over which all their
            lanes send in the plan's order; see the guide "Slow links". ``"auto"`` measures the link and chooses.
            Default: on the CPU each lane has a connection of its process group; on GPUs ``"auto"``, for transport host.

    Returns:
        This rank's mesh. Close it, or use it as a context manager.

    Raises:
        ValueError: An argument is wrong; raised on every rank. TypeError for a wrong type.
        LdtError: Ranks did not come in time or differ in an argument; names them.
        RemoteStageError: Another rank failed while connecting.
    """
    check_world()
    lanes_of(topology, lanes)
    ranks = _check_ranks(topology, ranks)
    rank = ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    device = choose_device(device, backend)
    timeouts = Timeouts(timeout, transfer_timeout, heartbeat_timeout, stall_timeout, outage)
    check_transport(transport, device)
    transfers = Transfers.of(topology, transfer)
    compressions = Compressions.of(topology, compression, device)
    return _connect(
        ConnectConfig(
            topology=topology,
            backend=backend,
            lanes=lanes,
            transfers=transfers,
            transport=transport,
            compressions=compressions,
            ranks=ranks,
            rank=rank,
            device=device,
            timeouts=timeouts,
            share_edge_errors=share_edge_errors,
            connections=_check_connections(connections, device, transport),
        )
    )


def _connect(config: ConnectConfig) -> Mesh:
    with closing(_own_connection(config.timeouts)) as store:
        global_rank = config.ranks[config.rank]
        key = mesh_key(store, global_rank, config.ranks) if dist.is_initialized() else "ldt/alone"
        process, thread = os.getpid(), threading.get_ident()
        if _connecting.setdefault(process, thread) != thread:
            # Waiting could deadlock: another rank may connect its meshes in another order.
            refuse(
                store,
                key,
                f"rank {global_rank} is connecting another mesh in another thread: connect meshes one after the "
                "other, in one order on all ranks; then each thread may use one",
            )
        try:
            return _check_in_and_open(config, store, key, global_rank)
        finally:
            _connecting.pop(process, None)


def _own_connection(timeouts: Timeouts) -> StoreConnection:
    """A connection to the store where ranks meet. To survive outages it is one of its own, with limits for requests.

    Else it is that of the user: the store looks up the name of each host that connects, which may take seconds.
    """
    seconds = timeouts.health.store.total_seconds() + _LATER_SECONDS
    with answering():
        store = default_store() if dist.is_initialized() else HashStore()
        outlast = seconds if timeouts.outage else 0.0
        return StoreConnection(store, seconds, outlast, borrows=not timeouts.outage)


def _check_in_and_open(config: ConnectConfig, store: StoreConnection, key: str, global_rank: int) -> Mesh:
    seconds = config.timeouts.connecting.total_seconds()
    deadline = time.monotonic() + seconds
    rank_info = RankInfo(config.topology, config.ranks, config.rank)
    with facts_of(rank_info, store) as facts:
        check = partial(check_in, key=key, rank=global_rank, ranks=config.ranks, settings=config.settings)
        found = ask(store, partial(check, seconds=seconds, facts=facts))
        config = replace(config, hosts=Hosts.of(found, rank_info))
        with answering():
            mesh = Mesh(config, store, key, partial(_connect, config))
        try:
            mesh.open(config, deadline)
            mesh.endpoints.update(tune_transfers(mesh, deadline))
        except BaseException as error:
            _fail(mesh, error)
    logger.info("connected as %s", mesh)
    return mesh


def _fail(mesh: Mesh, error: BaseException) -> NoReturn:
    try:
        mesh.fail(error, "connect")
    finally:
        mesh.close()


def _check_connections(
    connections: Connections | None, device: torch.device, transport: TransportChoice
) -> Connections | None:
    if connections is None:
        return None
    if connections != "auto":
        if isinstance(connections, bool) or not isinstance(connections, int):
            raise TypeError(f'connections must be an int, "auto" or None, got {connections!r}')
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ValueError(f"connections must be 1 to {MAX_CONNECTIONS}, got {connections}")
    elif sys.platform != "linux":
        raise ValueError('connections="auto" reads the counters of Linux\'s TCP: give a number')
    if device.type != "cpu" and transport not in ("auto", "host"):
        raise ValueError(
            f"connections={connections!r} are those of transport 'host' on {device}, got transport={transport!r}: use "
            "'host' or 'auto', or leave connections out"
        )
    return connections


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
