"""Selects the transport of each lane: the copy engine between GPUs of one host, host memory, NCCL, or c10d."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from ldt._C import (
    CopyEngineLinks,
    IpcPool,
    LaneError,
    NcclCommunicators,
    SocketLink,
    SocketLinks,
    has_nccl,
)
from ldt._cuda import MAX_QUEUES, QUEUES_VARIABLE, loads_lazily, queues
from ldt._torch_private import nccl_communicator
from ldt.errors import LdtError
from ldt.runtime.comm.group_layout import group_specs, lane_name, stage_name
from ldt.runtime.comm.host_links import connect_host_links
from ldt.runtime.comm.ipc_links import AllGather, IpcLink, LaneId, connect_ipc_links, ipc_links
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.socket_links import SocketConnector, crosses, socket_lanes

__all__ = ["LaneTransport", "TransportChoice", "TransportSelector", "check_transport"]

logger = logging.getLogger(__name__)

TransportChoice = Literal["auto", "copy_engine", "host", "nccl", "c10d"]


class LaneTransport(NamedTuple):
    """A lane's transport, its handle (None if this rank only joins broadcasts), and what to close after all lanes.

    ``in_site`` is the transport of the lane's messages that stay on a site.
    """

    kind: str
    in_site: str
    handle: CopyEngineLinks | NcclCommunicators | SocketLinks | None
    links: Sequence[SocketLink] = ()


def check_transport(transport: str, device: torch.device) -> None:
    """Raise ValueError if ``transport`` is unknown or does not support ``device``."""
    if transport not in get_args(TransportChoice):
        known = ", ".join(map(repr, get_args(TransportChoice)))
        raise ValueError(f"transport must be one of {known}, got {transport!r}")
    if device.type == "cpu" and transport not in ("auto", "c10d"):
        found = dist.get_backend_config() if dist.is_initialized() else "none"
        raise ValueError(
            f"transport={transport!r} needs GPUs, but this mesh is on the CPU, the default where the process group has "
            f"no backend for cuda (it has {found}): call init_process_group('cpu:gloo,cuda:nccl') or connect(..., "
            "device='cuda', backend='nccl'), or use transport='auto' or 'c10d' on the CPU"
        )
    if transport == "nccl" and device.type != "cuda":
        raise ValueError(f"transport='nccl' needs a CUDA device, got {device}; use 'auto' or 'c10d'")


@dataclass(frozen=True)
class TransportSelector:
    """Selects a transport for each lane of ``layout``, the same on all ranks."""

    transport: TransportChoice
    layout: LaneLayout
    all_gather: AllGather
    sockets: SocketConnector | None = None  # always given on devices
    hosts: Sequence[str] = ()  # of each rank, where known; "" elsewhere

    def select(self) -> dict[LaneId, LaneTransport]:
        """The transport of each lane of this rank. Lanes that are left out use their process groups.

        A collective call of all ranks of the topology. "auto" prefers the copy engine where all links of a lane
        connect, then host memory between sites, then NCCL, then the groups. Raises LdtError on all ranks if what was
        requested is not available on every lane that it is for, or if any rank has too few hardware queues.
        """
        warn_about_settings(self.layout.device)
        links = ipc_links(self.layout.topology, self.layout.policy, self.layout.transfers)
        own_lanes = [
            lane for lane, found in links.items() if any(self.layout.rank in link[1:3] for link in found)
        ]
        if self.layout.device.type == "cuda":
            self._check_queues(sum(_num_streams(found, self.layout.rank) for found in links.values()))
        if self.layout.device.type == "cpu":
            return {} if self.sockets is None else self._over_sockets(links, self.sockets)
        if self.transport == "c10d":
            return {}
        failed = set(links)
        transports: dict[LaneId, LaneTransport] = {}
        if self.transport != "nccl":
            transports, failed = self._over_copy_engine(links)
        if failed and self.layout.device.type == "cuda" and self._can_call_nccl():
            transports |= {lane: self._nccl_transport(lane) for lane in own_lanes if lane in failed}
        return transports

    def _over_sockets(
        self, links: Mapping[LaneId, Sequence[IpcLink]], sockets: SocketConnector
    ) -> dict[LaneId, LaneTransport]:
        crossing = [link for found in links.values() for link in found if crosses(link, self.layout.topology)]
        made = sockets.connect(crossing)
        ends = socket_lanes(links, self.layout, made)
        return {
            lane: LaneTransport("sockets", "c10d", end, list(made.values())) for lane, end in ends.items()
        }

    def _over_copy_engine(
        self, links: Mapping[LaneId, Sequence[IpcLink]]
    ) -> tuple[dict[LaneId, LaneTransport], set[LaneId]]:
        """This rank's lanes with IPC links or links through host memory, and all lanes that have neither."""
        layout = self.layout
        between = {link for found in links.values() for link in found if crosses(link, layout.topology)}
        by_host = between if self.transport == "host" else set()
        ends, failures = connect_ipc_links(
            _only(links, lambda link: link not in by_host), layout.rank, layout.device, self.all_gather
        )
        if self.transport == "auto":
            by_host = self._after_failures(links, between, failures)
        only_host = _only(links, lambda link: link in by_host)
        peers: dict[int, SocketLink] = {}
        if by_host:
            assert self.sockets is not None
            peers, refused = connect_host_links(only_host, ends, layout, self.sockets)
            replaced = {link.name for link in by_host}
            failures = {name: text for name, text in failures.items() if name not in replaced}
            for found in self.all_gather("host links", refused):
                failures |= found
        failed = {lane for lane, found in links.items() if any(link.name in failures for link in found)}
        if failures:
            self._report(failures)
        specs = group_specs(layout.topology, layout.policy, layout.transfers)
        members = {spec.name: spec.ranks for spec in specs}
        made: dict[LaneId, LaneTransport] = {}
        sockets = list(peers.values())
        for lane in links.keys() - failed:
            if any(layout.rank in link[1:3] for link in links[lane]):
                kind = "host" if only_host[lane] else "copy_engine"
                handle = ends[lane].for_lane(members[lane_name(*lane)])
                made[lane] = LaneTransport(kind, "copy_engine", handle, sockets)
        # Without a copy engine, a thread of the host copies, and the groups do the rest.
        deferred = {lane for lane in failed if only_host[lane]}
        of_host = socket_lanes(only_host, layout, peers) if deferred else {}
        made |= {lane: LaneTransport("host", "c10d", of_host[lane], sockets) for lane in deferred}
        return made, failed - deferred

    def _after_failures(
        self, links: Mapping[LaneId, Sequence[IpcLink]], between: set[IpcLink], failures: Mapping[str, str]
    ) -> set[IpcLink]:
        """The links between sites that host memory replaces.

        With copy engines, those that failed where all others of the lane work; without, those between hosts.
        """
        if not any(link.name in failures for link in between):
            return set()
        if not all(self.all_gather("copy engine", _has_copy_engine(self.layout.device))):
            return {link for link in between if len({self.hosts[rank] for rank in link[1:3]}) > 1}
        return {
            link
            for lane in links.values()
            for link in between.intersection(lane)
            if link.name in failures and not any(one.name in failures for one in set(lane) - between)
        }

    def _report(self, failures: Mapping[str, str]) -> None:
        text = _summary(failures)
        if self.transport == "copy_engine":
            raise LdtError(
                f"connect: not every lane can use transport={self.transport!r}; use transport='auto'. {text}"
            )
        logger.warning("some lanes cannot use the copy engine: they use the backend or host memory: %s", text)

    def _check_queues(self, streams: int) -> None:
        """Raise LdtError if any rank has too few hardware queues: streams that share a queue can deadlock."""
        needed, found = streams + 1, queues()
        short = needed > found and streams > 0
        advice = (
            f"restart it with {QUEUES_VARIABLE} unset or set to {needed} to {MAX_QUEUES}"
            if needed <= MAX_QUEUES
            else f"CUDA has at most {MAX_QUEUES}: use transfer='leader', lanes='paired' or fewer laps"
        )
        shortage = (
            f"rank {self.layout.rank} needs {needed} hardware queues, {streams} for the streams of its lanes, which "
            f"wait on the GPU, and one for compute, but {QUEUES_VARIABLE} gives it {found}: {advice}"
        )
        gathered = self.all_gather("queues", {"short": shortage} if short else {})
        shortages = [text for of_rank in gathered for text in of_rank.values()]
        if shortages:
            raise LdtError(
                f"connect: {shortages[0]}. If it is unset, importing ldt before CUDA starts sets it to {MAX_QUEUES}. "
                "Megatron-LM asks for 1 to fix the order of its own kernels; ldt does not need that"
            )

    def _can_call_nccl(self) -> bool:
        """Whether all ranks can call NCCL: both ends of a lane must use the same communicator."""
        supported = has_nccl() and any(
            dist.get_backend(group) == "nccl" for group in self.layout.groups.values()
        )
        can = all(self.all_gather("nccl", supported))
        if not can and self.transport == "auto":
            logger.warning("not all ranks can call NCCL directly: lanes use their process groups")
        if not can and self.transport == "nccl":
            raise LdtError(
                "connect: transport='nccl' needs the nccl backend and a torch that loads libnccl.so.2 on all ranks; "
                "use transport='c10d'"
            )
        return can

    def _nccl_transport(self, lane: LaneId) -> LaneTransport:
        """Create the communicators of this rank's groups of a lane, in the same order on all ranks."""
        key, stripe = lane
        node = self.layout.node
        names = lane_name(key, stripe), stage_name(key, node, stripe)
        p2p, stage = (
            None
            if name not in self.layout.groups
            else nccl_communicator(self.layout.groups[name], self.layout.device)
            for name in names
        )
        return LaneTransport("nccl", "nccl", NcclCommunicators(p2p=p2p, stage=stage))


def _only(
    links: Mapping[LaneId, Sequence[IpcLink]], keeps: Callable[[IpcLink], bool]
) -> dict[LaneId, list[IpcLink]]:
    """Every lane, with the links that ``keeps`` says."""
    return {lane: list(filter(keeps, found)) for lane, found in links.items()}


def _has_copy_engine(device: torch.device) -> bool:
    try:
        IpcPool(device)
    except LaneError:
        return False
    return True


def _num_streams(links: Sequence[IpcLink], rank: int) -> int:
    """The streams of ``rank`` that wait for a lane's transfers: two if it forwards what it receives."""
    ends = [link for link in links if rank in link[1:3]]
    receives = any(link.target == rank and not link.in_stage for link in ends)
    return bool(ends) + (receives and any(link.in_stage for link in links))


def warn_about_settings(device: torch.device) -> None:
    """Warn about CUDA settings in the environment that can cause deadlocks."""
    if device.type != "cuda":
        return
    if loads_lazily():
        logger.warning(
            "CUDA_MODULE_LOADING was not EAGER when CUDA started, so a kernel is loaded at its first launch. Loading "
            "can wait for everything queued on the GPU, and deadlocks behind a transfer that waits for this rank. "
            "Import ldt before CUDA starts, start the processes with CUDA_MODULE_LOADING=EAGER (costs 1 GiB and some "
            "seconds), or run every chunk forward and backward once before connect"
        )


def _summary(failures: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in failures.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
