"""Creates the groups, control plane and lanes of a mesh and connects them under a deadline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ldt.runtime.comm.endpoint import Endpoint, make_endpoints
from ldt.runtime.comm.group_exchange import GroupExchange, GroupRequest
from ldt.runtime.comm.group_layout import GLOO, LEADERS_CONTROL, control_name, group_specs, is_control
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.comm.ipc_links import LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.preconnect import check_warm_up, connect_all, connect_alone, limit_transfers
from ldt.runtime.comm.socket_links import DEFAULT_CONNECTIONS, SocketConnector
from ldt.runtime.comm.transports import LaneTransport, TransportSelector
from ldt.runtime.common.device import choose_backend, warm_up_libraries
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.common.time_left import time_left
from ldt.runtime.control.collectives import Collectives
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_broadcast import EdgeBroadcast, make_edge_broadcast
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.runtime.health.store_connection import StoreConnection
from ldt.runtime.mesh.config import ConnectConfig
from ldt.runtime.mesh.reachability import check_dials
from ldt.runtime.mesh.rendezvous import ask, share, share_all
from ldt.topology import Channel

__all__ = ["MeshSetup"]

_DIAL_SECONDS = 10.0  # TCP tries three times by then
_GLOO_TIMEOUTS = 5  # for which gloo waits for connections
_LATER_SECONDS = 5.0  # than the watchdog knows of a link that is down


class MeshSetup:
    """The steps that connect a mesh, in the order in which every rank takes them.

    ``key`` is the name of the mesh in ``store``. Each step raises LdtError if ``deadline`` (``time.monotonic()``)
    passes, RemoteStageError if another rank failed.
    """

    def __init__(
        self,
        config: ConnectConfig,
        rank_info: RankInfo,
        detector: FailureDetector,
        groups: GroupSet,
        store: StoreConnection,
        key: str,
        deadline: float,
    ) -> None:
        self._config = config
        self._rank_info = rank_info
        self._detector = detector
        self._watchdog = detector.watchdog
        self._groups = groups
        self._store = store
        self._key = key
        self._deadline = deadline
        self._layout = LaneLayout(
            config.topology, config.lanes, config.transfers, config.rank, groups, config.device
        )

    def make_groups(self) -> None:
        """Create this rank's process groups: those of gloo at once, then the others in one order on all ranks."""
        config, device = self._config, self._config.device
        warm_up_libraries(device, partial(check_warm_up, device, self._watchdog, self._deadline))
        requests = [
            GroupRequest(
                spec.name,
                f"{self._key}/{spec.name}",
                [config.ranks[rank] for rank in spec.ranks],
                GLOO if is_control(spec.name) else choose_backend(device, config.backend),
            )
            for spec in group_specs(config.topology, config.lanes, config.transfers)
            if config.rank in spec.ranks
        ]
        of_gloo = [request for request in requests if request.backend == GLOO]
        others = [request for request in requests if request.backend != GLOO]
        seconds = self._config.timeouts.health.store.total_seconds()
        self._groups.use_store(self._store.origin, seconds, own_connection=bool(others))
        self._check_dials({rank for request in of_gloo for rank in request.ranks})
        self._groups.make_gloo(of_gloo, self._gloo_timeout(), self._swap, self._watchdog.check)
        for request in others:
            self._watchdog.check()
            self._groups.make(*request, time_left(self._deadline, at_least=1.0))

    def _gloo_timeout(self) -> timedelta:
        """The timeout of groups of gloo while they are made. In debug mode torch keeps it for checks of its own."""
        left = time_left(self._deadline, at_least=1.0)
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            return left
        silence = self._config.timeouts.health.store + timedelta(seconds=_LATER_SECONDS)
        return min(left, silence) / _GLOO_TIMEOUTS

    def _check_dials(self, peers: set[int]) -> None:
        """Raise LdtError if gloo would wait in vain for a connection to another site: its own error names no rank."""
        limit = _DIAL_SECONDS + self._config.timeouts.health.recovery.total_seconds()
        seconds = min(limit, time_left(self._deadline).total_seconds() / 2)
        check_dials(self._rank_info, self._config.hosts.addresses, peers, self._watchdog, seconds)

    def _swap(self, exchanges: Sequence[GroupExchange]) -> None:
        """Send what gloo announces to its peers, and receive what they announce, for all ``exchanges`` together.

        Waits for all ranks of the mesh, so that gloo does not: only its timeout ends its waits.
        """
        by_key = {f"{one.key}/{one.rounds}": one for one in exchanges}
        ready = f"{self._key}/groups"
        call = partial(
            share_all,
            ranks={ready: self._rank_info.ranks, **{key: one.ranks for key, one in by_key.items()}},
            values={ready: True, **{key: one.announced for key, one in by_key.items()}},
            rank=self._rank_info.global_rank,
            watchdog=self._watchdog,
            deadline=self._deadline,
        )
        received = ask(self._store, call)
        for key, one in by_key.items():
            one.receive(received[key])

    def make_control(self) -> tuple[ControlPlane, EdgeBroadcast]:
        """Create the control plane and the edge broadcast over the control groups."""
        rank_info = self._rank_info
        collectives = Collectives(
            rank_info,
            self._detector,
            self._config.timeouts.transfer_timeout.total_seconds(),
            self._groups.get(control_name(rank_info.node)),
            self._groups.get(LEADERS_CONTROL) if rank_info.is_leader else None,
        )
        control = ControlPlane(rank_info, collectives, self._watchdog, lambda: self._detector.desync.current)
        return control, make_edge_broadcast(rank_info, collectives, self._detector, self._groups)

    def make_lanes(self) -> tuple[LaneLayout, Mapping[LaneId, LaneTransport], Mapping[Channel, Endpoint]]:
        """Choose the transport of each lane and create the endpoints of this rank."""
        connections, on_device = self._config.connections, self._config.device.type != "cpu"
        sockets = None
        if connections is not None or on_device:
            sockets = SocketConnector(
                self._layout,
                connections or DEFAULT_CONNECTIONS,
                self._share,
                self._watchdog,
                self._deadline,
                self._config.timeouts.outlast,
            )
        hosts = self._config.hosts.names(self._config.ranks)
        selector = TransportSelector(self._config.transport, self._layout, self._share, sockets, hosts)
        transports = selector.select()
        endpoints = make_endpoints(
            self._layout, self._config.timeouts.transfer_timeout, transports, self._config.compressions
        )
        return self._layout, transports, endpoints

    def connect(self, endpoints: Mapping[Channel, Endpoint]) -> None:
        """Send through every group and stripe once, so that they are connected before the first step."""
        layout = self._layout
        if dist.is_initialized():
            connect_alone(layout.groups, layout.device, self._watchdog, self._deadline)
        self._watchdog.check()  # a rank may have failed before this one had a lane to abort
        connect_all(layout, endpoints, self._watchdog, self._deadline)
        limit_transfers(layout.groups, layout.topology, self._config.timeouts.transfer_timeout)

    def _share(self, name: str, value: Any) -> list[Any]:
        """All-gather ``value`` under ``name``, in the order of the topology."""
        call = partial(
            share,
            key=f"{self._key}/transports/{name}",
            rank=self._rank_info.global_rank,
            ranks=self._rank_info.ranks,
            value=value,
            watchdog=self._watchdog,
            deadline=self._deadline,
        )
        return ask(self._store, call)
