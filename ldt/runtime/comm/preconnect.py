"""Connects the groups and strands of a mesh, one after the other, under a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from ldt.errors import LdtError
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.group_layout import GLOO, model_groups
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.transfer import CompositeWork
from ldt.runtime.health.watchdog import Watchdog
from ldt.topology import Channel, Topology

__all__ = [
    "await_connected",
    "await_on_host",
    "check_warm_up",
    "connect_all",
    "connect_alone",
    "limit_transfers",
]

_POLL_SECONDS = 0.001


def connect_all(
    layout: LaneLayout, endpoints: Mapping[Channel, Endpoint], watchdog: Watchdog, deadline: float
) -> None:
    """Connect the groups of the model and the stripes one after the other, so that a step finds all connected."""
    for what, work in _start_connecting(layout, endpoints):
        await_connected(work, what, watchdog, deadline)


def limit_transfers(
    groups: Mapping[str, dist.ProcessGroup], topology: Topology, transfer_timeout: timedelta
) -> None:
    """Of what goes through groups of the model, and of backends with streams; the rest the watch of failures limits."""
    of_model = {spec.name for spec in model_groups(topology)}
    for name, group in groups.items():
        if dist.get_backend(group) != GLOO or name in of_model:
            group.set_timeout(transfer_timeout)


def _start_connecting(
    layout: LaneLayout, endpoints: Mapping[Channel, Endpoint]
) -> Iterator[tuple[str, dist.Work]]:
    """One element through each group of the model, then one byte through each stripe, in orders equal on all ranks.

    Yields what is being connected and its work, which must be done before the next is asked for.
    """
    topology, groups, device = layout.topology, layout.groups, layout.device
    for spec in model_groups(topology):
        if spec.name in groups:
            one = torch.zeros(1, device=device)
            yield f"group {spec.name}", dist.all_reduce(one, group=groups[spec.name], async_op=True)
    for channel in topology.channels:
        end = endpoints.get(channel)
        if end is not None:
            for work in end.connect(device):
                yield f"channel {channel.name}", work


def connect_alone(
    groups: Mapping[str, dist.ProcessGroup], device: torch.device, watchdog: Watchdog, deadline: float
) -> None:
    """Groups of this rank alone: a communicator made within a step may wait for receives that wait for it."""
    for name, group in groups.items():
        if dist.get_world_size(group) == 1 and dist.get_backend(group) != GLOO:
            work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
            await_connected(work, f"group {name}", watchdog, deadline)


def check_warm_up(device: torch.device, watchdog: Watchdog, deadline: float) -> None:
    """Called while the first product is under way: raises RemoteStageError if another rank failed, or LdtError."""
    watchdog.check()
    if time.monotonic() > deadline:
        raise LdtError(
            f"connect: {device} did not get to a product of two small matrices in time: look at what else is queued "
            "on its current stream, or give a longer timeout"
        )


def await_connected(work: dist.Work, what: str, watchdog: Watchdog, deadline: float) -> None:
    """``await_on_host``, until ``deadline`` (``time.monotonic()``): then raises LdtError naming ``what``."""
    if not await_on_host(work, watchdog, _POLL_SECONDS, deadline):
        raise LdtError(
            f"connect: {what} was not connected in time: look at the output of the ranks at its other end, check "
            "that the hosts reach each other on all ports and use the same network interface, or give a longer "
            "timeout"
        )


def await_on_host(
    work: dist.Work | CompositeWork, watchdog: Watchdog, poll_seconds: float, deadline: float = math.inf
) -> bool:
    """Wait for the end of ``work``; False if it was not there by ``deadline``.

    Waiting with a timeout would not do: on a device with streams it only queues a wait there and returns.
    Raises RemoteStageError if another rank failed, and what went wrong with ``work``.
    """
    while not work.is_completed():
        watchdog.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_seconds)
    work.wait()
    return True
