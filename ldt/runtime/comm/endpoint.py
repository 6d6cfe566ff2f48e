"""This rank's ends of the channels: which lanes carry what of a message, and the peers' numbers on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.comm.group_layout import group_specs, lane_name, stage_name
from ldt.runtime.comm.ipc_links import LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.shards import overlap, span_of
from ldt.runtime.comm.transfer import LEADERS, CompositeWork, Stripe, parts_of
from ldt.runtime.comm.transports import LaneTransport
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.topology import Channel, LaneKey, lanes

__all__ = ["Endpoint", "StripeEnd", "make_endpoints"]

_WHOLE = 1 << 62  # bytes, as a size of pieces
Parts = Mapping[Stripe, Sequence[torch.Tensor]]


class StripeEnd(NamedTuple):
    """This rank's end of a strand. ``peer`` is None on a member, which only hears the broadcast."""

    lane: Lane
    peer: int | None


@dataclass(frozen=True)
class Endpoint:
    """One end of a channel on this rank: of a sending node the strands of this rank, of a receiving one all it hears.

    ``place`` is that of this rank in its node, ``sizes`` the ranks of the sending and of the receiving node, ``shares``
    into how many parts messages of ``scatter_from`` bytes or more are cut, one for each strand that is broadcast.
    """

    channel: Channel
    stripes: Mapping[Stripe, StripeEnd]
    place: int
    sizes: tuple[int, int]
    shares: int
    scatter_from: float
    sends: bool

    @property
    def lane(self) -> Lane:
        """That of the first strand that this rank has an end of."""
        return next(iter(self.stripes.values())).lane

    def scattering_from(self, nbytes: float) -> Endpoint:
        """The same end, which cuts messages of ``nbytes`` or more."""
        return replace(self, scatter_from=nbytes)

    def buffers(
        self, specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]], device: torch.device
    ) -> list[torch.Tensor]:
        """Memory of ``shapes`` for a message: the lane's own, unless others, which do not know it, write there, too."""
        pairs = [(shape, spec.dtype) for spec, shape in zip(specs, shapes, strict=True)]
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)
        if self._is_cut(nbytes) or any(spec.shard is not None for spec in specs):
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs]
        return self.lane.buffers([list(shape) for shape in shapes], [spec.dtype for spec in specs])

    def send(
        self, tensors: Sequence[torch.Tensor], label: str, specs: Sequence[TensorSpec] | None = None
    ) -> CompositeWork | None:
        """Start sending this rank's part; None if others have all of it. Without ``specs`` no tensor is split."""
        assert self.sends, self.channel
        works = []
        for stripe, part in self._parts(tensors, specs).items():
            end = self.stripes.get(stripe)
            if end is not None:
                assert end.peer is not None, self.channel
                works.append(end.lane.send(part, end.peer, label=label))
        return CompositeWork(works) if works else None

    def receive(
        self, tensors: Sequence[torch.Tensor], label: str, specs: Sequence[TensorSpec] | None = None
    ) -> CompositeWork:
        assert not self.sends, self.channel
        assert all(tensor.is_contiguous() for tensor in tensors), "parts of others would be copies"
        ends = [(self.stripes[stripe], part) for stripe, part in self._parts(tensors, specs).items()]
        return CompositeWork([end.lane.recv(part, end.peer, label=label) for end, part in ends])

    def connect(self, device: torch.device) -> Iterator[dist.Work]:
        """One byte through each strand that this rank has an end of, each to be done before the next."""
        for stripe in self.stripes.values():
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            if self.sends:
                assert stripe.peer is not None, self.channel
                yield stripe.lane.send(byte, stripe.peer, label="connect")
            else:
                yield stripe.lane.recv(byte, stripe.peer, label="connect")

    # -- what goes over which strand ---------------------------------------------------------------------------

    def _is_cut(self, nbytes: int) -> bool:
        return self.shares > 1 and nbytes >= self.scatter_from

    def _parts(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec] | None) -> Parts:
        """Parts without an element are left out, on both ends."""
        direct = [stripe for stripe in self.stripes if stripe.direct]
        if direct and self.shares == 0:
            return dict.fromkeys(direct, tensors)
        if not direct or specs is None:
            return self._of_whole(tensors)
        pairs = list(zip(tensors, specs, strict=True))
        whole = [tensor for tensor, spec in pairs if spec.shard is None]
        split = [(tensor, spec) for tensor, spec in pairs if spec.shard is not None]
        parts = dict(self._of_whole(whole)) if whole else {}
        for stripe in direct:
            pieces = [self._piece(tensor, spec, stripe) for tensor, spec in split]
            if any(piece.numel() for piece in pieces):
                parts[stripe] = pieces
        return parts

    def _of_whole(self, tensors: Sequence[torch.Tensor]) -> Parts:
        """Tensors of which each rank of a node has, or gets, all."""
        if self._is_cut(sum(tensor.numel() * tensor.element_size() for tensor in tensors)):
            return {Stripe(place, place): part for place, part in enumerate(parts_of(tensors, self.shares))}
        return {LEADERS: tensors}

    def _piece(self, part: torch.Tensor, spec: TensorSpec, stripe: Stripe) -> torch.Tensor:
        """What both ends of ``stripe`` have of a tensor that is split, as a view of this rank's part of it."""
        assert spec.shard is not None
        size = spec.shape[spec.shard]
        ends = (span_of(size, place, parts) for place, parts in zip(stripe[:2], self.sizes, strict=True))
        mine, theirs = ends if self.sends else reversed(tuple(ends))
        return overlap(part, spec.shard, mine, theirs)


def make_endpoints(
    layout: LaneLayout, timeout: timedelta, transports: Mapping[LaneId, LaneTransport]
) -> dict[Channel, Endpoint]:
    """The ends of all channels that touch this rank's node. Ranks that own no stripe of an outgoing channel get none.

    The groups carry lanes that ``transports`` lacks.
    """
    topology, policy, transfers, groups = layout.topology, layout.policy, layout.transfers, layout.groups
    device, node = layout.device, layout.node
    place = topology.ranks_of(node).index(layout.rank)
    members = {spec.name: spec.ranks for spec in group_specs(topology, policy, transfers)}
    made: dict[tuple[LaneKey, Stripe], Lane] = {}
    by_lane = lanes(topology, policy)
    broadcast = {key for channel, key in by_lane.items() if topology.tp[channel.target.stage] > 1}

    def lane_of(key: LaneKey, stripe: Stripe, mine: bool) -> Lane:
        """There is a stage group where the node receives on it; specs are agreed, so nothing is announced."""
        transport = transports.get((key, stripe))
        cut = device.type == "cpu" or (key in broadcast and not stripe.direct)
        if (key, stripe) not in made:
            made[key, stripe] = Lane(
                lane_name(key, stripe),
                device=device,
                chunk_bytes=None if cut else _WHOLE,  # pieces are for broadcasting one while the next comes
                p2p=groups[lane_name(key, stripe)] if mine else None,
                stage=groups.get(stage_name(key, node, stripe)),
                stage_root=stripe.target,
                timeout=timeout,
                announce=False,
                transport=None if transport is None else transport.handle,
            )
        return made[key, stripe]

    endpoints = {}
    for channel, key in by_lane.items():
        if node not in (channel.source, channel.target):
            continue
        sends = channel.source == node
        other = topology.ranks_of(channel.target if sends else channel.source)
        stripes = transfers.stripes(channel)
        ends = {}
        for stripe in stripes:
            here, there = stripe[:2] if sends else (stripe.target, stripe.source)
            if place == here or not (sends or stripe.direct):
                name = lane_name(key, stripe)
                peer = members[name].index(other[there]) if place == here else None
                ends[stripe] = StripeEnd(lane_of(key, stripe, place == here), peer)
        if ends:
            shares = sum(not stripe.direct for stripe in stripes)
            sizes = transfers.sizes(channel)
            endpoints[channel] = Endpoint(
                channel, ends, place, sizes, shares, transfers.scatter_from(channel), sends
            )
    return endpoints
