"""This rank's ends of the channels: a lane to call, and the peer's number on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.groups import group_specs, lane_name, stage_name
from ldt.topology import Channel, LaneKey, LanePolicy, Topology, lanes

__all__ = ["Endpoint", "make_endpoints", "preconnect"]


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


def preconnect(
    endpoints: Mapping[Channel, Endpoint], order: Iterable[Channel], device: torch.device, timeout: timedelta
) -> None:
    """Send one byte through every channel, in the global ``order``, so that the first step finds all connected."""
    for channel in order:
        end = endpoints.get(channel)
        if end is None:
            continue
        byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
        (end.send if end.sends else end.receive)(byte, "connect").wait(timeout)
