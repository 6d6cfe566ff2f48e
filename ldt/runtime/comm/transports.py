"""How the payload of each lane moves: by the copy engine between GPUs of one host, by NCCL, or through c10d."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from ldt._C import IpcLinks, NcclCommunicators, has_nccl
from ldt._cuda import MAX_QUEUES, QUEUES_VARIABLE, loads_lazily, queues
from ldt._torch_private import nccl_communicator
from ldt.errors import LdtError
from ldt.runtime.comm.group_layout import group_specs, lane_name, stage_name
from ldt.runtime.comm.ipc_links import AllGather, IpcLink, LaneId, LaneIpcLinks, connect_ipc_links, ipc_links
from ldt.runtime.comm.lane_layout import LaneLayout

__all__ = ["LaneTransport", "TransportChoice", "TransportSelector", "check_transport"]

logger = logging.getLogger(__name__)

TransportChoice = Literal["auto", "copy_engine", "nccl", "c10d"]


class LaneTransport(NamedTuple):
    """How a lane's payload moves, and what the lane is given for it."""

    kind: str
    handle: IpcLinks | NcclCommunicators


def check_transport(transport: str, device: torch.device) -> None:
    """Raises ValueError for a transport that there is not, or not for ``device``."""
    if transport not in get_args(TransportChoice):
        known = ", ".join(map(repr, get_args(TransportChoice)))
        raise ValueError(f"transport must be one of {known}, got {transport!r}")
    if device.type == "cpu" and transport in ("copy_engine", "nccl"):
        found = dist.get_backend_config() if dist.is_initialized() else "none"
        raise ValueError(
            f"transport={transport!r} is for GPUs; this mesh is on the CPU, as by default where the process group has "
            f"no backend for cuda (it has {found}): write init_process_group('cpu:gloo,cuda:nccl'), or connect(..., "
            "device='cuda', backend='nccl'), or use transport='auto' or 'c10d' on the CPU"
        )
    if transport == "nccl" and device.type != "cuda":
        raise ValueError(f"transport='nccl' is for CUDA devices, got {device}; use 'auto' or 'c10d'")


@dataclass(frozen=True)
class TransportSelector:
    """Selects what carries each lane of ``layout``, in agreement with all other ranks (``share``)."""

    transport: TransportChoice
    layout: LaneLayout
    share: AllGather

    def select(self) -> dict[LaneId, LaneTransport]:
        """The carrier of each lane that this rank has an end of and that its groups do not carry themselves.

        A collective call of all ranks of the topology. "auto" takes the copy engine where all routes of a lane can be
        connected, then NCCL, then the groups. Raises LdtError on all ranks if the copy engine or NCCL was asked for
        and cannot be had on every lane, and if one of the ranks has too few hardware queues.
        """
        warn_of_settings(self.layout.device)
        routes = ipc_links(self.layout.topology, self.layout.policy, self.layout.transfers)
        mine = [
            lane for lane, found in routes.items() if any(self.layout.rank in route[1:3] for route in found)
        ]
        if self.layout.device.type == "cuda":
            self._check_queues(sum(_streams(found, self.layout.rank) for found in routes.values()))
        if self.layout.device.type == "cpu" or self.transport == "c10d":
            return {}
        refused = set(routes)
        carriers: dict[LaneId, LaneTransport] = {}
        if self.transport != "nccl":
            ends, refused = self._connect_ipc_links(routes)
            layout = self.layout
            specs = {
                spec.name: spec for spec in group_specs(layout.topology, layout.policy, layout.transfers)
            }
            for lane in mine:
                if lane not in refused:
                    members = specs[lane_name(*lane)].ranks
                    carriers[lane] = LaneTransport("copy_engine", ends[lane].for_lane(members))
        if refused and self.layout.device.type == "cuda" and self._can_call_nccl():
            carriers |= {lane: self._by_nccl(lane) for lane in mine if lane in refused}
        return carriers

    def _check_queues(self, streams: int) -> None:
        """Where streams share a hardware queue, one that waits holds up what it waits for: nothing ends then."""
        needed, found = streams + 1, queues()
        short = needed > found and streams > 0
        advice = (
            f"start it with {QUEUES_VARIABLE} unset or {needed} to {MAX_QUEUES}"
            if needed <= MAX_QUEUES
            else f"CUDA has {MAX_QUEUES} at most: take transfer='leader', lanes='paired' or fewer laps"
        )
        mine = (
            f"rank {self.layout.rank} has lanes on {streams} streams, which wait on the GPU, and compute on another, "
            f"but {QUEUES_VARIABLE} gives it {found} hardware queues for these {needed}: {advice}"
        )
        told = self.share("queues", {"short": mine} if short else {})
        texts = [text for of_rank in told for text in of_rank.values()]
        if texts:
            raise LdtError(
                f"connect: {texts[0]}. Unless it is set, importing ldt before anything starts CUDA sets it to "
                f"{MAX_QUEUES}. Megatron-LM asks for 1 to fix the order of its own kernels; ldt does not need that"
            )

    def _connect_ipc_links(
        self, routes: Mapping[LaneId, Sequence[IpcLink]]
    ) -> tuple[Mapping[LaneId, LaneIpcLinks], set[LaneId]]:
        """This rank's ends, and the lanes that do not get them: equal on all ranks."""
        ends, refusals = connect_ipc_links(routes, self.layout.rank, self.layout.device, self.share)
        if refusals:
            text = _summary(refusals)
            if self.transport == "copy_engine":
                raise LdtError(f"connect: not every lane can use the copy engine; take 'auto'. {text}")
            logger.warning("lanes that go through the backend instead of the copy engine: %s", text)
        refused = {lane for lane, found in routes.items() if any(route.name in refusals for route in found)}
        return ends, refused

    def _can_call_nccl(self) -> bool:
        """The same on all ranks: the two ends of a lane must not use different communicators."""
        mine = has_nccl() and any(dist.get_backend(group) == "nccl" for group in self.layout.groups.values())
        can = all(self.share("nccl", mine))
        if not can and self.transport == "auto":
            logger.warning("NCCL cannot be called directly on all ranks: lanes go through process groups")
        if not can and self.transport == "nccl":
            raise LdtError(
                "connect: transport='nccl' needs the backend nccl and a torch that loads libnccl.so.2, on all ranks; "
                "use 'c10d'"
            )
        return can

    def _by_nccl(self, lane: LaneId) -> LaneTransport:
        """Makes the communicators of this rank's groups of a lane, in the order of all ranks."""
        key, stripe = lane
        node = self.layout.node
        names = lane_name(key, stripe), stage_name(key, node, stripe)
        p2p, stage = (
            None
            if name not in self.layout.groups
            else nccl_communicator(self.layout.groups[name], self.layout.device)
            for name in names
        )
        return LaneTransport("nccl", NcclCommunicators(p2p=p2p, stage=stage))


def _streams(routes: Sequence[IpcLink], rank: int) -> int:
    """How many streams of ``rank`` wait for a lane's transfers: two where it passes on what it receives."""
    ends = [route for route in routes if rank in route[1:3]]
    receives = any(route.target == rank and not route.in_stage for route in ends)
    return bool(ends) + (receives and any(route.in_stage for route in routes))


def warn_of_settings(device: torch.device) -> None:
    """Log which settings of CUDA in the environment do harm."""
    if device.type != "cuda":
        return
    if loads_lazily():
        logger.warning(
            "CUDA_MODULE_LOADING was not EAGER when CUDA started: a kernel is loaded when it is launched for the first "
            "time, and that can wait for all that is queued on the GPU, also for a transfer that waits for this rank, "
            "so that no rank goes on. Import ldt before anything starts CUDA, or start the processes with "
            "CUDA_MODULE_LOADING=EAGER (which takes 1 GiB and some seconds more), or run every chunk forward and "
            "backward once before connect"
        )


def _summary(refusals: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
