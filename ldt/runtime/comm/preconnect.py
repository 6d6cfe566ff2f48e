"""Connects the groups and stripes of a mesh ahead of the first step, under a deadline."""

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
from ldt.runtime.comm.transfer_modes import CompositeWork
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
    """Connect the model's groups and all stripes, so that no step has to: on a device one after the other."""
    connecting = _start_connecting(layout, endpoints)
    for what, work in list(connecting) if layout.device.type == "cpu" else connecting:
        await_connected(work, what, watchdog, deadline)


def limit_transfers(
    groups: Mapping[str, dist.ProcessGroup], topology: Topology, transfer_timeout: timedelta
) -> None:
    """Set the timeout of the model's groups and of backends with streams. The watchdog enforces all others."""
    of_model = {spec.name for spec in model_groups(topology)}
    for name, group in groups.items():
        if dist.get_backend(group) != GLOO or name in of_model:
            group.set_timeout(transfer_timeout)


def _start_connecting(
    layout: LaneLayout, endpoints: Mapping[Channel, Endpoint]
) -> Iterator[tuple[str, dist.Work]]:
    """Reduce one element in each group of the model, then send one byte over each stripe, in one order on all ranks.

    Yields a description and a work, which on a device must be done before the next one is taken.
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
    """Connect groups of one rank: creating their communicator within a step could deadlock with posted receives."""
    for name, group in groups.items():
        if dist.get_world_size(group) == 1 and dist.get_backend(group) != GLOO:
            work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
            await_connected(work, f"group {name}", watchdog, deadline)


def check_warm_up(device: torch.device, watchdog: Watchdog, deadline: float) -> None:
    """Raise RemoteStageError if another rank failed, LdtError after ``deadline``. Polled by ``warm_up_libraries``."""
    watchdog.check()
    if time.monotonic() > deadline:
        raise LdtError(
            f"connect: {device} did not finish a small matmul in time: check what else is queued on its current "
            "stream, or pass a longer timeout"
        )


def await_connected(work: dist.Work, what: str, watchdog: Watchdog, deadline: float) -> None:
    """Wait for ``work``. Raises LdtError naming ``what`` after ``deadline`` (as ``time.monotonic()``)."""
    if not await_on_host(work, watchdog, _POLL_SECONDS, deadline):
        raise LdtError(
            f"connect: {what} was not connected in time: check the output of the ranks at its other end, check that "
            "the hosts reach each other on all ports and use the same network interface, or pass a longer timeout"
        )


def await_on_host(
    work: dist.Work | CompositeWork, watchdog: Watchdog, poll_seconds: float, deadline: float = math.inf
) -> bool:
    """Block the host until ``work`` is done. Returns False if it is not by ``deadline``.

    ``work.wait(timeout)`` would not block: on a device with streams it only queues a wait there and returns.
    Raises RemoteStageError if another rank failed, and the error of ``work`` if it failed.
    """
    while not work.is_completed():
        watchdog.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_seconds)
    work.wait()
    return True
