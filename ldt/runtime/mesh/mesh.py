"""The mesh: a rank's place in a topology, and everything it talks through."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ldt._C import Lane
from ldt.errors import LdtError, RemoteStageError, TransferError
from ldt.runtime.comm import group_layout as naming
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.comm.lane_set import LaneSet
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.common.error_text import safe_isinstance
from ldt.runtime.common.managed import managed
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.redact import unredacted
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_broadcast import EdgeBroadcast
from ldt.runtime.health.failure_detector import FailureDetector, is_secondary_error
from ldt.runtime.health.fork_guard import check_process
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.runtime.mesh.config import ConnectConfig
from ldt.runtime.mesh.device_meshes import DeviceMeshes
from ldt.runtime.mesh.setup import MeshSetup
from ldt.topology import Channel, LanePolicy, Node, Topology

__all__ = ["Mesh"]

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0  # for what is under way on all lanes


class Mesh:
    """This rank's place in a connected topology, made by ``connect``.

    A context manager that closes the mesh, and tells the other ranks of an exception that leaves it.

    ``rank`` is the rank within the topology, ``ranks[rank]`` the global one. After a failure anywhere, ``failed`` is
    true on every rank within about a second and the mesh cannot be used any more: connect again.
    """

    def __init__(
        self, config: ConnectConfig, store: Any, key: str, connect_again: Callable[[], Mesh]
    ) -> None:
        self.rank_info = RankInfo(config.topology, config.ranks, config.rank)
        self.lanes: LanePolicy = config.lanes
        self.transfers = config.transfers
        self.device = config.device
        self.store = store
        self.key = key
        self._connect_again = connect_again
        self._process = os.getpid()
        self._closed = False
        self._pipelines = 0
        self._groups = GroupSet(self._abort_lanes)
        self._lane_set = LaneSet()
        self._device_meshes = DeviceMeshes(self.rank_info, self._groups, key, config.device, config.backend)
        self.shards = NodeShards(self.tp_rank, self.topology.tp[self.stage], lambda: self.tp_mesh)
        self._control: ControlPlane | None = None
        self._edge_broadcast: EdgeBroadcast | None = None
        self.detector = FailureDetector(
            self.rank_info,
            store,
            key,
            config.timeouts.health,
            shares_errors=config.share_edge_errors or not self.is_edge,
            on_failure=self._on_failure,
            force_abort=self._groups.break_all,
            overdue=self._overdue,
            lost_connections=self._groups.lost_connections,
        )

    # -- who this rank is ------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        return self.rank_info.topology

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global rank of each rank of the topology."""
        return self.rank_info.ranks

    @property
    def rank(self) -> int:
        """This rank's number within the topology."""
        return self.rank_info.rank

    @property
    def global_rank(self) -> int:
        return self.rank_info.global_rank

    @property
    def node(self) -> Node:
        return self.rank_info.node

    @property
    def stage(self) -> int:
        return self.rank_info.stage

    @property
    def replica(self) -> int:
        return self.rank_info.replica

    @property
    def tp_rank(self) -> int:
        return self.rank_info.tp_rank

    @property
    def is_leader(self) -> bool:
        """True for the first rank of a node; unless messages are cut in shares, it alone talks to other nodes."""
        return self.rank_info.is_leader

    @property
    def is_edge(self) -> bool:
        return self.rank_info.is_edge

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
        """This rank's ends of the channels of its node; ranks that own no stripe of an outgoing channel have none."""
        return self._lane_set.endpoints

    def count_pipeline(self) -> int:
        """The number of a new pipeline, equal on all ranks if they make theirs in one order."""
        self._pipelines += 1
        return self._pipelines

    def all_lanes(self) -> list[Lane]:
        """Every lane that this rank has an end of."""
        return self._lane_set.all()

    def transport_of(self, channel: Channel) -> str:
        """What carries ``channel``: "copy_engine", "nccl" or "c10d". KeyError if this rank has no end of it.

        Where its stripes differ, all of theirs, as "c10d and copy_engine".
        """
        return self._lane_set.transport_of(channel)

    def lane_for(self, channel: Channel) -> Lane:
        """The lane that carries ``channel`` on this rank. KeyError if this rank has no end of it."""
        return self.endpoints[channel].lane

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
        node = f"stage {self.stage}, replica {self.replica}, tp_rank {self.tp_rank}"
        who = f"{self.topology.to_text()}, rank {self.rank} (global {self.global_rank}): {node}"
        return f"Mesh({who}, {self.lanes} lanes on {self.device})"

    # -- internal --------------------------------------------------------------------------------------------

    def open(self, config: ConnectConfig, deadline: float) -> None:
        """Create the groups and lanes and connect them. ``connect`` does this, once."""
        setup = MeshSetup(config, self.rank_info, self.detector, self._groups, self.store, self.key, deadline)
        setup.make_groups()
        self._control, self._edge_broadcast = setup.make_control()
        self._lane_set.set(*setup.make_lanes())
        if dist.is_initialized():
            self._device_meshes.part("tp")  # not first while shapes are inferred
        setup.connect(self.endpoints)

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
        self._lane_set.abort(reason)
        if self._edge_broadcast is not None:
            self._edge_broadcast.abort(reason)

    def _overdue(self) -> str:
        """The transfer that takes too long; empty if there is none. Called from the watchdog's thread."""
        late = self._lane_set.overdue()
        advice = "look at the rank at its other end, or give connect a longer transfer_timeout"
        return late and f"rank {self.global_rank}: {late}: {advice}"

    def _drop_lanes(self) -> None:
        """In a function of its own, so that no variable outlives it: a lane holds its groups."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        first: BaseException | None = None
        if self.failed:
            self._abort_lanes()
        else:
            first = self._lane_set.close(deadline)
        if self._edge_broadcast is not None:
            first = (
                run_teardown([("close the edge broadcast", partial(self._edge_broadcast.close, deadline))])
                or first
            )
        self._lane_set.clear()
        self._edge_broadcast = None
        if first is not None:
            raise first

    def _drop_groups(self) -> None:
        self._device_meshes.clear()
        if self._control is not None:
            self._control.close()
        if self.failed:  # also if only since
            self._groups.break_all()
        self._groups.destroy()
