"""The mesh: a rank's place in a topology, and everything it talks through."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ldt._C import Lane
from ldt.errors import LdtError, RemoteStageError, TransferError
from ldt.runtime.comm import group_layout as naming
from ldt.runtime.comm.endpoint import Endpoint, make_endpoints
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.comm.ipc_links import LaneId
from ldt.runtime.comm.preconnect import check_warm_up, connect_all, connect_alone, limit_transfers
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.comm.transports import LaneTransport, TransportSelector
from ldt.runtime.common.device import choose_backend, warm_up_libraries
from ldt.runtime.common.error_text import safe_isinstance
from ldt.runtime.common.managed import managed
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.redact import unredacted
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.control.collectives import Collectives
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_broadcast import EdgeBroadcast, make_edge_broadcast
from ldt.runtime.health.failure_detector import FailureDetector, is_secondary_error
from ldt.runtime.health.fork_guard import check_process
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.runtime.mesh.config import ConnectConfig
from ldt.runtime.mesh.device_meshes import DeviceMeshes
from ldt.runtime.mesh.rendezvous import share
from ldt.topology import Channel, LanePolicy
from ldt.topology import lanes as lanes_of

__all__ = ["Mesh"]

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0  # for what is under way on all lanes


class Mesh(RankInfo):
    """This rank's place in a connected topology, made by ``connect``.

    A context manager that closes the mesh, and tells the other ranks of an exception that leaves it.

    ``rank`` is the rank within the topology, ``ranks[rank]`` the global one. After a failure anywhere, ``failed`` is
    true on every rank within about a second and the mesh cannot be used any more: connect again.
    """

    def __init__(
        self,
        config: ConnectConfig,
        store: Any,
        key: str,
        connect_again: Callable[[], Mesh],
    ) -> None:
        super().__init__(config.topology, config.ranks, config.rank)
        self.lanes: LanePolicy = config.lanes
        self.transfers = config.transfers
        self.device = config.device
        self._config = config
        self._key = key
        self._store = store
        self._connect_again = connect_again
        self._groups = GroupSet(self._abort_lanes)
        self._endpoints: dict[Channel, Endpoint] = {}
        self._transports: dict[LaneId, LaneTransport] = {}
        self._watched: tuple[Lane, ...] = ()
        self._device_meshes = DeviceMeshes(self, self._groups, key, config.device, config.backend)
        self.shards = NodeShards(self.tp_rank, self.topology.tp[self.stage], lambda: self.tp_mesh)
        self._closed = False
        self._process = os.getpid()
        self._pipelines = 0
        self._control: ControlPlane | None = None
        self._edge_broadcast: EdgeBroadcast | None = None
        self.detector = FailureDetector(
            self,
            store,
            key,
            config.timeouts.health,
            shares_errors=config.share_edge_errors or not self.is_edge,
            on_failure=self._on_failure,
            force_abort=self._groups.break_all,
            overdue=self._overdue,
            lost_connections=self._groups.lost_connections,
        )

    # -- torch's own device meshes ---------------------------------------------------------------------------

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks of this node, which share its layers: for ``parallelize_module``.

        Its dimension is "tp", in the second mesh of a process "tp_2" and so on. With ``dp_mesh`` it is a part of one
        mesh of two dimensions, so that layers may be split over both.
        """
        self._check_process()
        return self._device_meshes.part("tp")

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The ranks that hold the same weights in other replicas: for DDP or ``fully_shard``. Its dimension is "dp"."""
        self._check_process()
        return self._device_meshes.part("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The group of ``dp_mesh``; None when there is one replica."""
        self._check_process()
        return self._groups.get(naming.dp_name(self.stage, self.tp_rank))

    # -- what it talks through -------------------------------------------------------------------------------

    @property
    def control(self) -> ControlPlane:
        assert self._control is not None, "the mesh is not connected"
        self._check_process()
        return self._control

    @property
    def edge_broadcast(self) -> EdgeBroadcast:
        assert self._edge_broadcast is not None, "the mesh is not connected"
        self._check_process()
        return self._edge_broadcast

    @property
    def endpoints(self) -> dict[Channel, Endpoint]:
        """This rank's ends of the channels of its node; a member has none of what its node sends."""
        return self._endpoints

    def count_pipeline(self) -> int:
        """The number of a new pipeline, equal on all ranks if they make theirs in one order."""
        self._pipelines += 1
        return self._pipelines

    def all_lanes(self) -> list[Lane]:
        """Every lane that this rank has an end of."""
        lanes = (stripe.lane for end in self._endpoints.values() for stripe in end.stripes.values())
        return list({id(lane): lane for lane in lanes}.values())

    def transport_of(self, channel: Channel) -> str:
        """What carries ``channel``: "copy_engine", "nccl" or "c10d". KeyError if this rank has no end of it.

        Where its strands differ, all of theirs, as "c10d and copy_engine".
        """
        key = lanes_of(self.topology, self.lanes)[channel]
        transports = (self._transports.get((key, stripe)) for stripe in self._endpoints[channel].stripes)
        return " and ".join(
            sorted({"c10d" if transport is None else transport.kind for transport in transports})
        )

    def lane_for(self, channel: Channel) -> Lane:
        """The lane that carries ``channel`` on this rank. KeyError if this rank has no end of it."""
        return self._endpoints[channel].lane

    # -- failing and closing ---------------------------------------------------------------------------------

    @property
    def watchdog(self) -> Watchdog:
        return self.detector.watchdog

    @property
    def failed(self) -> bool:
        return self.watchdog.first is not None

    def check_usable(self) -> None:
        """Raise LdtError if this mesh is closed, of another process or has failed: RemoteStageError if elsewhere."""
        self._check_process()
        first = self.watchdog.first
        if first is not None:
            refused = "this mesh cannot be used after a failure; connect again. "
            if first.rank == self.global_rank:
                raise LdtError(refused + first.describe())
            raise first.as_error(refused)
        if self._closed:
            raise LdtError("this mesh is closed; connect again")

    def calling(self, name: str) -> AbstractContextManager[None]:
        """Held around a collective call of all ranks: where others are in another one, all fail within seconds.

        Raises LdtError within another call of this rank.
        """
        return self.detector.calling(name)

    @managed
    def collective(self, name: str) -> Iterator[None]:
        """Held around a collective call whose failure on one rank is that of all, who would wait for it in vain."""
        self.check_usable()
        with self.calling(name):
            try:
                yield
            except BaseException as error:
                self.fail(error, name)

    def fail(self, error: BaseException, place: str, detail: str = "") -> NoReturn:
        """Tell every rank that this one failed at ``place``, and raise.

        From the edge they learn the type of ``error`` and where it was raised, and its text only if it is one of this
        package's own or ``connect`` was given ``share_edge_errors``; from the cloud, all of it.
        That is ``error`` itself if this rank was first, otherwise a RemoteStageError about the rank that was.
        ``detail`` is only logged, where the failure was first.
        """
        if not self._is_here:
            raise error  # of a forked child
        first = self.detector.publish(error, place)
        self._groups.break_all()
        mine = first.rank == self.global_rank
        if mine:
            logger.error("%s failed in %s: %s\n%s", self, place, unredacted(error)[0], detail)
        remote = safe_isinstance(error, RemoteStageError)
        if mine and is_secondary_error(error) and not remote:
            raise TransferError(first.describe()) from error  # of this rank's own, or others gave it up
        if mine or remote or not safe_isinstance(error, Exception):
            raise error  # also what ends a program, such as Ctrl-C
        # A consequence of that failure has nothing to add to it; an error of this rank's own has.
        raise first.as_error() from None if is_secondary_error(error) else error

    def shareable_text(self, error: BaseException) -> str:
        """What the other ranks may learn of ``error``; see ``fail``."""
        return self.detector.shareable_text(error)

    def close(self) -> None:
        """Finish what is in flight, stop the threads and drop the groups. Local to this rank; idempotent.

        Other ranks are told: one that still makes a collective call gets a RemoteStageError that names this rank.
        After a failure nothing is waited for. What cannot be ended leaves the rest, and is raised in the end.
        Raises LdtError within a call of this mesh that goes on, on any thread, and in a forked child.
        """
        if self._closed:
            return
        self._check_process()
        if not self.failed:
            self.detector.desync.check_free("close()")
        self._closed = True
        if self.failed:  # before what may take a while
            self._groups.break_all()
        steps = (self.detector.stop, self._drop_lanes, self._drop_groups)
        first = run_teardown(("close the mesh in full", step) for step in steps)
        if first is not None:
            raise first

    def reconnect(self) -> Mesh:
        """Close this mesh and connect anew, with the same arguments. All ranks must; raises as ``connect`` does.

        After a failure of which all processes are left. Pipelines are then made anew on the mesh that this returns, of
        the same chunks, unless their layers were spread over ``tp_mesh`` or ``dp_mesh``: such are built and loaded
        anew. Gradients are what the failed step left: load a checkpoint, which drops them, or do so.
        """
        self.close()
        return self._connect_again()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_here:
            return  # a forked child leaves it as it is
        code = error.code if error is not None and safe_isinstance(error, SystemExit) else 1  # type: ignore[attr-defined]
        ends = code is None or (type(code) is int and code == 0)  # with nothing wrong
        if error is not None and not ends and not self._closed:
            self.detector.publish(error)
        self.close()

    def __repr__(self) -> str:
        place = f"stage {self.stage}, replica {self.replica}, tp_rank {self.tp_rank}"
        who = f"{self.topology.to_text()}, rank {self.rank} (global {self.global_rank}): {place}"
        return f"Mesh({who}, {self.lanes} lanes on {self.device})"

    # -- internal --------------------------------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        """Create the groups and lanes and connect them. ``connect`` does this, once."""
        warm_up_libraries(self.device, partial(check_warm_up, self.device, self.watchdog, deadline))
        transfer_timeout = self._config.timeouts.transfer_timeout
        self._groups.use_store(self._store)
        for spec in naming.group_specs(self.topology, self.lanes, self.transfers):
            if self.rank in spec.ranks:
                self.watchdog.check()
                control = naming.is_control(spec.name)
                kind = naming.GLOO if control else choose_backend(self.device, self._config.backend)
                members = [self.ranks[rank] for rank in spec.ranks]
                self._groups.make(spec.name, f"{self._key}/{spec.name}", members, kind, _until(deadline))
        collectives = Collectives(
            self,
            self.detector,
            transfer_timeout.total_seconds(),
            self._groups.get(naming.control_name(self.node)),
            self._groups.get(naming.LEADERS_CONTROL) if self.is_leader else None,
        )
        self._control = ControlPlane(self, collectives, self.watchdog, lambda: self.detector.desync.current)
        self._edge_broadcast = make_edge_broadcast(self, collectives, self.detector, self._groups)
        self._transports = self._select_transports(deadline)
        self._endpoints = make_endpoints(
            self.topology,
            self.lanes,
            self.transfers,
            self.rank,
            self._groups,
            self.device,
            transfer_timeout,
            self._transports,
        )
        self._watched = tuple(self.all_lanes())
        if dist.is_initialized():
            self._device_meshes.part("tp")  # not first while shapes are inferred
            connect_alone(self._groups, self.device, self.watchdog, deadline)
        self.watchdog.check()  # what failed before there was a lane to abort
        connect_all(self._groups, self.topology, self._endpoints, self.device, self.watchdog, deadline)
        limit_transfers(self._groups, self.topology, transfer_timeout)

    def _select_transports(self, deadline: float) -> dict[LaneId, LaneTransport]:
        def share_with_all(name: str, value: Any) -> list[Any]:
            key = f"{self._key}/transports/{name}"
            return share(self._store, key, self.global_rank, self.ranks, value, self.watchdog, deadline)

        place = (self.topology, self.lanes, self.transfers, self.rank, self._groups, self.device)
        return TransportSelector(self._config.transport, *place, share_with_all).select()

    @property
    def _is_here(self) -> bool:
        """Whether this process has connected the mesh, and was not forked from the one that has."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        check_process("this mesh", self._process)

    def _on_failure(self, report: FailureReport) -> None:
        logger.info("%s; rank %d aborts its lanes", report.describe(), self.global_rank)
        self._groups.abort()

    def _abort_lanes(self) -> None:
        """After a failure, and before groups are aborted: NCCL must not be called with their communicators then."""
        first = self.watchdog.first
        reason = "the mesh is closed" if first is None else first.describe()
        post = [] if self._edge_broadcast is None else self._edge_broadcast.lanes()
        run_teardown(
            (f"abort lane {lane.name}", partial(lane.abort, reason)) for lane in [*self._watched, *post]
        )

    def _overdue(self) -> str:
        """What takes longer than a transfer may; empty if nothing does. Asked from the thread that watches."""
        late = next(filter(None, (lane.overdue() for lane in self._watched)), "")
        advice = "look at the rank at its other end, or give connect a longer transfer_timeout"
        return late and f"rank {self.global_rank}: {late}: {advice}"

    def _drop_lanes(self) -> None:
        """A method of its own, so that no variable outlives it: a lane holds its groups."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        if self.failed:
            self._abort_lanes()
        lanes = [] if self.failed else self.all_lanes()
        ends: list[tuple[str, Any]] = [(f"close lane {lane.name}", lane.close) for lane in lanes]
        if self._edge_broadcast is not None:
            ends.append(("close the lanes of the edge's letters", self._edge_broadcast.close))
        first = run_teardown((what, lambda close=close: close(_left(deadline))) for what, close in ends)  # type: ignore[misc]
        self._endpoints.clear()
        self._transports.clear()
        self._watched, self._edge_broadcast = (), None
        lanes.clear()
        ends.clear()
        if first is not None:
            raise first

    def _drop_groups(self) -> None:
        self._device_meshes.clear()
        if self._control is not None:
            self._control.close()
        if self.failed:  # also if only since
            self._groups.break_all()
        self._groups.destroy()


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.0, deadline - time.monotonic()))


def _until(deadline: float) -> timedelta:
    return max(timedelta(seconds=1), _left(deadline))
