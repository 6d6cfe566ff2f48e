"""This rank's ends of the channels: a lane to call, and the peer's number on it; and how all is connected."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ldt._C import Lane
from ldt.errors import LdtError
from ldt.runtime.failure import FailureWatch
from ldt.runtime.groups import GroupSpec, group_specs, lane_name, stage_name
from ldt.topology import Channel, LaneKey, LanePolicy, Topology, lanes

__all__ = ["Endpoint", "await_connected", "await_on_host", "make_endpoints", "start_connecting"]

_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Endpoint:
    """One end of a channel on this rank. ``peer`` is None on a member, which only hears the broadcast."""

    channel: Channel
    lane: Lane
    peer: int | None
    sends: bool

    def send(self, tensors: list[torch.Tensor], label: str) -> dist.Work:
        assert self.sends, self.channel
        assert self.peer is not None, self.channel
        return self.lane.send(tensors, self.peer, label=label)

    def receive(self, tensors: list[torch.Tensor], label: str) -> dist.Work:
        assert not self.sends, self.channel
        return self.lane.recv(tensors, self.peer, label=label)


def make_endpoints(
    topology: Topology,
    policy: LanePolicy,
    rank: int,
    groups: Mapping[str, dist.ProcessGroup],
    device: torch.device,
    timeout: timedelta,
) -> dict[Channel, Endpoint]:
    """The ends of all channels that touch ``rank``'s node. A member has no end of what its node sends."""
    node = topology.node_of(rank)
    members = {spec.name: spec.ranks for spec in group_specs(topology, policy)}
    made: dict[LaneKey, Lane] = {}
    endpoints = {}
    by_channel = lanes(topology, policy)
    receives_on = {key for channel, key in by_channel.items() if channel.target == node}
    for channel, key in by_channel.items():
        if node not in (channel.source, channel.target):
            continue
        sends = channel.source == node
        leads = rank == topology.leader_of(node)
        if sends and not leads:
            continue
        if key not in made:
            made[key] = Lane(
                lane_name(key),
                device=device,
                p2p=groups[lane_name(key)] if leads else None,
                stage=groups.get(stage_name(key, node)) if key in receives_on else None,
                timeout=timeout,
                announce=False,  # the specs of every hop are agreed and checked before anything is sent
            )
        other = topology.leader_of(channel.target if sends else channel.source)
        peer = members[lane_name(key)].index(other) if leads else None
        endpoints[channel] = Endpoint(channel, made[key], peer, sends)
    return endpoints


def start_connecting(
    groups: Mapping[str, dist.ProcessGroup],
    model_groups: Iterable[GroupSpec],
    endpoints: Mapping[Channel, Endpoint],
    channels: Iterable[Channel],
    device: torch.device,
) -> Iterator[tuple[str, dist.Work]]:
    """One element through each group of the model, then one byte through each channel, in the given global orders.

    A step then finds all connected. Yields what is being connected and its work, which must be done before the next
    is asked for.
    """
    for spec in model_groups:
        if spec.name in groups:
            one = torch.zeros(1, device=device)
            yield f"group {spec.name}", dist.all_reduce(one, group=groups[spec.name], async_op=True)
    for channel in channels:
        end = endpoints.get(channel)
        if end is not None:
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            call = end.send if end.sends else end.receive
            yield f"channel {channel.name}", call(byte, "connect")


def await_connected(work: dist.Work, what: str, failures: FailureWatch, deadline: float) -> None:
    """``await_on_host``, until ``deadline`` (``time.monotonic()``): then raises LdtError naming ``what``."""
    if not await_on_host(work, failures, _POLL_SECONDS, deadline):
        raise LdtError(
            f"connect: {what} was not connected in time: look at the output of the ranks at its other end, check "
            "that the hosts reach each other on all ports and use the same network interface, or give a longer "
            "timeout"
        )


def await_on_host(
    work: dist.Work, failures: FailureWatch, poll_seconds: float, deadline: float = math.inf
) -> bool:
    """Wait for the end of ``work``; False if it was not there by ``deadline``.

    Waiting with a timeout would not do: on a device with streams it only queues a wait there and returns.
    Raises RemoteStageError if another rank failed, and what went wrong with ``work``.
    """
    while not work.is_completed():
        failures.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_seconds)
    work.wait()
    return True
