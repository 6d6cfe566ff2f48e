"""The mesh: a rank of a connected topology, with its groups, lanes and failure detector."""

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
from ldt.runtime.health.connections import outlast_served
from ldt.runtime.health.failure_detector import FailureDetector, is_secondary_error
from ldt.runtime.health.fork_guard import check_process
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.runtime.mesh.config import ConnectConfig
from ldt.runtime.mesh.device_meshes import DeviceMeshes
from ldt.runtime.mesh.setup import MeshSetup
from ldt.topology import Channel, LanePolicy, Node, Topology

__all__ = ["Mesh"]

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0  # for messages in flight on all lanes


class Mesh:
    """A connected topology, as this rank sees it. ``ldt.connect`` returns one.

    As a context manager it closes the mesh at the end, and reports an exception that leaves the block to the other
    ranks.

    ``rank`` is the rank within the topology, ``ranks[rank]`` the global one. After a failure anywhere, ``failed`` is
    true on every rank within about a second and the mesh can no longer be used: connect again.

    Different threads may use a mesh each. In a process forked from a rank, such as a worker of a DataLoader, every
    call of the mesh raises LdtError.
    """

    def __init__(
        self, config: ConnectConfig, store: Any, key: str, connect_again: Callable[[], Mesh]
    ) -> None:
        self.rank_info = RankInfo(config.topology, config.ranks, config.rank, config.hosts.store_rank)
        self.lanes: LanePolicy = config.lanes
        self.transfers = config.transfers
        self.compressions = config.compressions
        self.device = config.device
        self._store, self._key = store, key
        self._connect_again = connect_again
        self._process = os.getpid()
        self._closed = False
        self._pipelines = 0
        self._recovery = config.timeouts.health.recovery.total_seconds()
        self._groups = GroupSet(self._abort_lanes, config.timeouts.outlast)
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
            addresses=config.hosts.addresses,
        )

    # -- this rank -------------------------------------------------------------------------------------------

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
        """True for the first rank of a node. With transfer "leader" it alone sends to and receives from other nodes."""
        return self.rank_info.is_leader

    @property
    def is_edge(self) -> bool:
        return self.rank_info.is_edge

    # -- device meshes --------------------------------------------------------------------------------------

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks of this node, which share its layers, for ``parallelize_module``.

        Its dimension is named "tp", in the second mesh of a process "tp_2" and so on. It and ``dp_mesh`` are slices of
        one two-dimensional DeviceMesh, so layers may be sharded over both.
        """
        self._check_process()
        return self._device_meshes.part("tp")

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The ranks that hold the same weights in all replicas, for DDP or ``fully_shard``. Its dimension is "dp"."""
        self._check_process()
        return self._device_meshes.part("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The process group of ``dp_mesh``; None if there is one replica."""
        self._check_process()
        return self._groups.get(naming.dp_name(self.stage, self.tp_rank))

    # -- communication ---------------------------------------------------------------------------------------

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
        """This rank's endpoints of its node's channels. A rank that owns no stripe of an outgoing channel has none."""
        return self._lane_set.endpoints

    def next_pipeline_number(self) -> int:
        """The number of a new pipeline, equal on all ranks if they create pipelines in the same order."""
        self._pipelines += 1
        return self._pipelines

    def all_lanes(self) -> list[Lane]:
        """Every lane that has an endpoint on this rank."""
        return self._lane_set.all()

    def transport_of(self, channel: Channel) -> str:
        """Return the transport of ``channel``; all if its stripes differ.

        Args:
            channel: One of ``topology.channels``.

        Returns:
            "copy_engine", "host", "nccl", "sockets" or "c10d", or names as in "c10d and copy_engine".

        Raises:
            KeyError: This rank has no endpoint of ``channel``.
        """
        return self._lane_set.transport_of(channel)

    def lane_for(self, channel: Channel) -> Lane:
        """The lane that carries ``channel`` on this rank. Raises KeyError if this rank has no endpoint of it."""
        return self.endpoints[channel].lane

    # -- failing and closing ---------------------------------------------------------------------------------

    @property
    def watchdog(self) -> Watchdog:
        return self.detector.watchdog

    @property
    def failed(self) -> bool:
        """Whether a rank of this mesh has failed, as far as this rank knows."""
        return self.watchdog.first is not None

    def check_usable(self) -> None:
        """Raise LdtError if this mesh is closed, forked or has failed; RemoteStageError if another rank failed."""
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
        """Enter a collective call of all ranks. If other ranks are in a different one, all fail within seconds.

        Raises LdtError if this rank is already in a call.
        """
        return self.detector.calling(name)

    @managed
    def collective(self, name: str) -> Iterator[None]:
        """Enter a collective call in which an error on one rank fails the mesh, so that no rank waits for it."""
        self.check_usable()
        with self.calling(name):
            try:
                yield
            except BaseException as error:
                self.fail(error, name)

    def fail(self, error: BaseException, position: str, detail: str = "") -> NoReturn:
        """Report to every rank that this one failed at ``position``, and raise.

        Raises ``error`` itself if this rank failed first, otherwise a RemoteStageError about the rank that did.
        ``detail`` is only logged, on the rank that failed first. Other ranks receive the whole ``error`` of a cloud
        rank. Of one of the edge they receive the type and where it was raised; the text only if it is this package's
        own exception or ``connect`` was given ``share_edge_errors``.
        """
        try:
            if not self._is_here:
                raise error  # in a forked child
            first = self.detector.publish(error, position)
            self._groups.break_all()
            is_first = first.rank == self.global_rank
            if is_first:
                logger.error("%s failed in %s: %s\n%s", self, position, unredacted(error)[0], detail)
            remote = safe_isinstance(error, RemoteStageError)
            if is_first and is_secondary_error(error) and not remote:
                raise TransferError(first.describe()) from error  # of this rank's own, or aborted by a peer
            if is_first or remote or not safe_isinstance(error, Exception):
                raise error  # also exceptions that end a program, such as Ctrl-C
            # A secondary error adds nothing to the first failure; this rank's own error does.
            raise first.as_error() from None if is_secondary_error(error) else error
        finally:
            del error  # this frame is in its traceback: a cycle would keep what frames hold, such as lanes

    def shareable_text(self, error: BaseException) -> str:
        """The text of ``error`` that may be sent to other ranks; see ``fail``."""
        return self.detector.shareable_text(error)

    def close(self) -> None:
        """Complete the messages in flight, stop the threads and destroy the groups. Local to this rank; idempotent.

        A rank that makes a collective call afterwards raises RemoteStageError, which names this rank. After a failure
        close waits for nothing. If one part cannot be closed, the others still are, and its error is raised at the end.

        Raises:
            LdtError: A call of this mesh is running, on any thread, or this is a forked process.
        """
        if self._closed:
            return
        self._check_process()
        if not self.failed:
            self.detector.desync.check_free("close()")
        self._closed = True
        if self.failed:  # first, as the steps below may take a while
            self._groups.break_all()
        steps = (self.detector.stop, self._drop_lanes, self._drop_groups)
        first = run_teardown(("close the mesh in full", step) for step in steps)
        if first is not None:
            raise first

    def reconnect(self) -> Mesh:
        """Close this mesh and connect again with the same arguments. A collective call of all ranks.

        For a failure that all processes survived. Create the pipelines again on the new mesh, from the same chunks;
        chunks with layers sharded over ``tp_mesh`` or ``dp_mesh`` must be built and loaded again. The failed step has
        left gradients: load a checkpoint, which drops them, or drop them yourself.

        Returns:
            The new mesh.

        Raises:
            LdtError: As ``connect`` does, as are ValueError, TypeError and RemoteStageError.
        """
        self.close()
        return self._connect_again()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_here:
            return  # in a forked child
        code = error.code if error is not None and safe_isinstance(error, SystemExit) else 1  # type: ignore[attr-defined]
        success = code is None or (type(code) is int and code == 0)
        if error is not None and not success and not self._closed:
            self.detector.publish(error)
        self.close()

    def __repr__(self) -> str:
        node = f"stage {self.stage}, replica {self.replica}, tp_rank {self.tp_rank}"
        rank = f"{self.topology.to_text()}, rank {self.rank} (global {self.global_rank}): {node}"
        return f"Mesh({rank}, {self.lanes} lanes on {self.device})"

    # -- internal --------------------------------------------------------------------------------------------

    def open(self, config: ConnectConfig, deadline: float) -> None:
        """Create the groups and lanes and connect them. Called once, by ``connect``."""
        setup = MeshSetup(
            config, self.rank_info, self.detector, self._groups, self._store, self._key, deadline
        )
        setup.make_groups()
        self._control, self._edge_broadcast = setup.make_control()
        self._lane_set.set(*setup.make_lanes())
        if dist.is_initialized():
            self._device_meshes.part("tp")  # cannot be created while shapes are inferred
        setup.connect(self.endpoints)
        outlast_served(self._store, config.timeouts.outlast)

    @property
    def _is_here(self) -> bool:
        """Whether this process connected the mesh, rather than being forked from the one that did."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        check_process("this mesh", self._process)

    def _on_failure(self, report: FailureReport) -> None:
        logger.info("%s; rank %d aborts its lanes", report.describe(), self.global_rank)
        self._groups.abort()

    def _abort_lanes(self) -> None:
        """Abort the lanes before their groups: NCCL must not be called with an aborted communicator."""
        first = self.watchdog.first
        reason = "the mesh is closed" if first is None else first.describe()
        edge_broadcast = self._edge_broadcast  # another thread may be dropping it
        self._lane_set.abort(reason)
        if edge_broadcast is not None:
            edge_broadcast.abort(reason)

    def _overdue(self) -> str:
        """Describe a transfer that takes too long; empty if there is none. Called on the watchdog's thread."""
        late = self._lane_set.overdue()
        longer = ", or give connect a longer transfer_timeout" if "timeout" in late else ""
        return late and f"rank {self.global_rank}: {late}: look at the rank at its other end{longer}"

    def _drop_lanes(self) -> None:
        """Close and drop the lanes. No local variable may outlive this: a lane holds its groups."""
        deadline = time.monotonic() + _CLOSING_SECONDS + self._recovery
        first: BaseException | None = None
        if self.failed:
            self._abort_lanes()
        else:
            first = self._lane_set.close(deadline)
        if self._edge_broadcast is not None:
            step = ("close the edge broadcast", partial(self._edge_broadcast.close, deadline))
            later = run_teardown([step])
            first = first or later
        self._lane_set.clear()
        self._edge_broadcast = None
        if first is not None:
            raise first

    def _drop_groups(self) -> None:
        self._device_meshes.clear()
        if self._control is not None:
            self._control.close()
        if self.failed:  # perhaps only while closing
            self._groups.break_all()
        self._groups.destroy()
