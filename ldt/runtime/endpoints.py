"""This rank's ends of the channels: a lane to call, and the peer's number on it; and how all is connected."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ldt._C import Lane
from ldt.errors import LdtError
from ldt.runtime.failure import FailureWatch
from ldt.runtime.groups import GroupSpec, group_specs, lane_name, stage_name
from ldt.runtime.strands import LEADERS, AllOf, Strand, Transfer, parts_of, scatter_from, strands_of
from ldt.topology import Channel, LaneKey, LanePolicy, Topology, lanes

__all__ = ["Endpoint", "StrandEnd", "await_connected", "await_on_host", "make_endpoints", "start_connecting"]

_POLL_SECONDS = 0.001


class StrandEnd(NamedTuple):
    """This rank's end of a strand. ``peer`` is None on a member, which only hears the broadcast."""

    lane: Lane
    peer: int | None


@dataclass(frozen=True)
class Endpoint:
    """One end of a channel on this rank: of a sending node the strand of this rank, of a receiving one all it hears.

    ``shares`` is into how many parts messages of ``scatter_from`` bytes or more are cut, one for each strand.
    """

    channel: Channel
    strands: Mapping[Strand, StrandEnd]
    shares: int
    scatter_from: int
    sends: bool

    @property
    def lane(self) -> Lane:
        """That of the first strand that this rank has an end of."""
        return next(iter(self.strands.values())).lane

    def buffers(
        self, specs: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Memory to receive a message into: the lane's own, unless others, which do not know it, write there too."""
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
        if self._is_cut(nbytes):
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
        return [self.lane.empty(shape, dtype) for shape, dtype in specs]

    def send(self, tensors: Sequence[torch.Tensor], label: str) -> dist.Work | None:
        """Start sending this rank's part; None if others have all of it."""
        assert self.sends, self.channel
        ((strand, end),) = self.strands.items()
        part = self._parts(tensors).get(strand)
        if part is None:
            return None
        assert end.peer is not None, self.channel
        return end.lane.send(part, end.peer, label=label)

    def receive(self, tensors: Sequence[torch.Tensor], label: str) -> dist.Work | AllOf:
        assert not self.sends, self.channel
        assert all(tensor.is_contiguous() for tensor in tensors), "parts of others would be copies"
        ends = ((self.strands[strand], part) for strand, part in self._parts(tensors).items())
        works = [end.lane.recv(part, end.peer, label=label) for end, part in ends]
        return works[0] if len(works) == 1 else AllOf(works)

    def _is_cut(self, nbytes: int) -> bool:
        return self.shares > 1 and nbytes >= self.scatter_from

    def _parts(self, tensors: Sequence[torch.Tensor]) -> dict[Strand, Sequence[torch.Tensor]]:
        """What goes over which strand."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._is_cut(nbytes):
            return {Strand(place): part for place, part in enumerate(parts_of(tensors, self.shares))}
        return {strand: tensors for strand in self.strands if strand.direct} or {LEADERS: tensors}

    def connect(self, device: torch.device) -> Iterator[dist.Work]:
        """One byte through each strand that this rank has an end of, each to be done before the next."""
        for strand in self.strands.values():
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            if self.sends:
                assert strand.peer is not None, self.channel
                yield strand.lane.send(byte, strand.peer, label="connect")
            else:
                yield strand.lane.recv(byte, strand.peer, label="connect")


def make_endpoints(
    topology: Topology,
    policy: LanePolicy,
    transfer: Transfer,
    rank: int,
    groups: Mapping[str, dist.ProcessGroup],
    device: torch.device,
    timeout: timedelta,
) -> dict[Channel, Endpoint]:
    """The ends of all channels that touch ``rank``'s node. Of what its node sends, a rank without a strand has none."""
    node = topology.node_of(rank)
    place = topology.ranks_of(node).index(rank)
    members = {spec.name: spec.ranks for spec in group_specs(topology, policy, transfer)}
    by_channel = lanes(topology, policy)
    made: dict[tuple[LaneKey, Strand], Lane] = {}

    def lane_of(key: LaneKey, strand: Strand) -> Lane:
        """There is a stage group where the node receives on it; specs are agreed, so nothing is announced."""
        if (key, strand) not in made:
            made[key, strand] = Lane(
                lane_name(key, strand),
                device=device,
                p2p=groups[lane_name(key, strand)] if place == strand.place else None,
                stage=groups.get(stage_name(key, node, strand)),
                stage_root=strand.place,
                timeout=timeout,
                announce=False,
            )
        return made[key, strand]

    endpoints = {}
    for channel, key in by_channel.items():
        if node not in (channel.source, channel.target):
            continue
        sends = channel.source == node
        other = topology.ranks_of(channel.target if sends else channel.source)
        strands = strands_of(topology, channel, transfer)
        ends = {}
        for strand in strands:
            mine = place == strand.place
            if mine or not (sends or strand.direct):
                peer = members[lane_name(key, strand)].index(other[strand.place]) if mine else None
                ends[strand] = StrandEnd(lane_of(key, strand), peer)
        if ends:
            shares = 1 if strands[0].direct else len(strands)
            endpoints[channel] = Endpoint(channel, ends, shares, scatter_from(transfer), sends)
    return endpoints


def start_connecting(
    groups: Mapping[str, dist.ProcessGroup],
    model_groups: Iterable[GroupSpec],
    endpoints: Mapping[Channel, Endpoint],
    channels: Iterable[Channel],
    device: torch.device,
) -> Iterator[tuple[str, dist.Work]]:
    """One element through each group of the model, then one byte through each strand, in the given global orders.

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
            for work in end.connect(device):
                yield f"channel {channel.name}", work


def await_connected(work: dist.Work, what: str, failures: FailureWatch, deadline: float) -> None:
    """``await_on_host``, until ``deadline`` (``time.monotonic()``): then raises LdtError naming ``what``."""
    if not await_on_host(work, failures, _POLL_SECONDS, deadline):
        raise LdtError(
            f"connect: {what} was not connected in time: look at the output of the ranks at its other end, check "
            "that the hosts reach each other on all ports and use the same network interface, or give a longer "
            "timeout"
        )


def await_on_host(
    work: dist.Work | AllOf, failures: FailureWatch, poll_seconds: float, deadline: float = math.inf
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
