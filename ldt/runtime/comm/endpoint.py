"""This rank's ends of the channels: which lane carries which part of a message, and to which peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.comm.compression import Compressions, Scheme, wire_bytes
from ldt.runtime.comm.group_layout import group_specs, lane_name, stage_name
from ldt.runtime.comm.ipc_links import LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.shards import overlap, span_of
from ldt.runtime.comm.transfer_modes import LEADERS, CompositeWork, Stripe, parts_of
from ldt.runtime.comm.transports import LaneTransport
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.topology import Channel, LaneKey, lanes

__all__ = ["Endpoint", "Parts", "StripeEnd", "make_endpoints"]

_UNCUT = 1 << 62  # a chunk_bytes that no message reaches
Parts = dict[Stripe, list[torch.Tensor]]
Pairs = list[tuple[torch.Tensor, TensorSpec]]


class StripeEnd(NamedTuple):
    """This rank's end of a stripe. ``peer`` is None on a rank that only receives the stage's broadcast."""

    lane: Lane
    peer: int | None


@dataclass(frozen=True)
class Endpoint:
    """One end of a channel on this rank.

    Attributes:
        channel: The channel.
        stripes: On the sending node, the stripes that this rank sends. On the receiving node, those it receives.
        tp_rank: This rank's index in its node.
        sizes: Number of ranks of the sending and of the receiving node.
        shares: Number of parts that a message of ``scatter_from`` bytes or more is cut into, one per broadcast stripe.
        scatter_from: See ``shares``.
        sends: Whether this is the sending end.
        scheme: How tensors are packed. ``send`` and ``receive`` are for messages that are not.
    """

    channel: Channel
    stripes: Mapping[Stripe, StripeEnd]
    tp_rank: int
    sizes: tuple[int, int]
    shares: int
    scatter_from: float
    sends: bool
    scheme: Scheme = "none"

    @property
    def lane(self) -> Lane:
        """The lane of this rank's first stripe."""
        return next(iter(self.stripes.values())).lane

    def scattering_from(self, nbytes: float) -> Endpoint:
        """This endpoint with ``scatter_from=nbytes``."""
        return replace(self, scatter_from=nbytes)

    def send(self, tensors: Sequence[torch.Tensor], label: str) -> CompositeWork | None:
        """Start sending this rank's part of tensors that are not split over ranks. Returns None if it has none."""
        return self.send_parts(self._plain_parts(tensors), label)

    def send_parts(self, parts: Parts, label: str) -> CompositeWork | None:
        """Start sending those of ``parts`` that this rank has a stripe for. Returns None if it has none."""
        assert self.sends, self.channel
        works = []
        for stripe, part in parts.items():
            end = self.stripes.get(stripe)
            if end is not None:
                assert end.peer is not None, self.channel
                works.append(end.lane.send(part, end.peer, label=label))
        return CompositeWork(works) if works else None

    def receive(self, tensors: Sequence[torch.Tensor], label: str) -> CompositeWork:
        """Start receiving tensors that are not split over ranks."""
        assert all(tensor.is_contiguous() for tensor in tensors), (
            "parts of non-contiguous tensors would be copies"
        )
        return self.receive_parts(self._plain_parts(tensors), label)

    def receive_parts(self, parts: Parts, label: str) -> CompositeWork:
        """Start receiving ``parts``."""
        assert not self.sends, self.channel
        ends = [(self.stripes[stripe], part) for stripe, part in parts.items()]
        return CompositeWork([end.lane.recv(part, end.peer, label=label) for end, part in ends])

    def connect(self, device: torch.device) -> Iterator[dist.Work]:
        """Send or receive one byte on each of this rank's stripes. See ``connect_all``."""
        for stripe in self.stripes.values():
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            if self.sends:
                assert stripe.peer is not None, self.channel
                yield stripe.lane.send(byte, stripe.peer, label="connect")
            else:
                yield stripe.lane.recv(byte, stripe.peer, label="connect")

    # -- which stripe carries what -----------------------------------------------------------------------------

    def _is_cut(self, nbytes: int) -> bool:
        return self.shares > 1 and nbytes >= self.scatter_from

    def is_in_pieces(self, specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether several lanes write to one tensor of a message. ``shapes`` are those of this rank's tensors."""
        sizes = [wire_bytes(self.scheme, spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
        return self._is_cut(sum(sizes)) or any(spec.shard is not None for spec in specs)

    def parts(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> dict[Stripe, Pairs]:
        """The part of each stripe, each tensor with its spec. Parts without elements are left out, on both ends."""
        direct = [stripe for stripe in self.stripes if stripe.direct]
        pairs = list(zip(tensors, specs, strict=True))
        if direct and self.shares == 0:
            return dict.fromkeys(direct, pairs)
        if not direct:
            return self._of_whole(pairs)
        whole = [(tensor, spec) for tensor, spec in pairs if spec.shard is None]
        sharded = [(tensor, spec) for tensor, spec in pairs if spec.shard is not None]
        parts = dict(self._of_whole(whole)) if whole else {}
        for stripe in direct:
            pieces = [(self._piece(tensor, spec, stripe), spec) for tensor, spec in sharded]
            if any(piece.numel() for piece, _ in pieces):
                parts[stripe] = pieces
        return parts

    def _plain_parts(self, tensors: Sequence[torch.Tensor]) -> Parts:
        parts = self.parts(tensors, list(map(TensorSpec.of, tensors)))
        return {stripe: [tensor for tensor, _ in part] for stripe, part in parts.items()}

    def _of_whole(self, pairs: Pairs) -> dict[Stripe, Pairs]:
        """The parts of tensors that every rank of a node has, or receives, in full."""
        if self._is_cut(sum(wire_bytes(self.scheme, spec, tensor.shape) for tensor, spec in pairs)):
            shares = parts_of([tensor for tensor, _ in pairs], self.shares)
            return {
                Stripe(rank, rank): [(view, spec) for view, (_, spec) in zip(share, pairs, strict=True)]
                for rank, share in enumerate(shares)
            }
        return {LEADERS: pairs}

    def _piece(self, part: torch.Tensor, spec: TensorSpec, stripe: Stripe) -> torch.Tensor:
        """The view of ``part``, this rank's shard, that both ends of ``stripe`` have."""
        assert spec.shard is not None
        size = spec.shape[spec.shard]
        spans = [span_of(size, rank, parts) for rank, parts in zip(stripe[:2], self.sizes, strict=True)]
        local, remote = spans if self.sends else reversed(spans)
        return overlap(part, spec.shard, local, remote)


def make_endpoints(
    layout: LaneLayout,
    timeout: timedelta,
    transports: Mapping[LaneId, LaneTransport],
    compressions: Compressions,
) -> dict[Channel, Endpoint]:
    """The endpoints of all channels of this rank's node. Ranks that own no stripe of an outgoing channel get none.

    Lanes that ``transports`` lacks use their process groups.
    """
    topology, policy, transfers, groups = layout.topology, layout.policy, layout.transfers, layout.groups
    device, node = layout.device, layout.node
    tp_rank = topology.ranks_of(node).index(layout.rank)
    members = {spec.name: spec.ranks for spec in group_specs(topology, policy, transfers)}
    created: dict[tuple[LaneKey, Stripe], Lane] = {}
    by_lane = lanes(topology, policy)
    broadcast = {key for channel, key in by_lane.items() if topology.tp[channel.target.stage] > 1}

    def lane_of(key: LaneKey, stripe: Stripe, is_end: bool) -> Lane:
        """The stripe's lane, created once."""
        transport = transports.get((key, stripe))
        cut = device.type == "cpu" or (key in broadcast and not stripe.direct)
        if (key, stripe) not in created:
            created[key, stripe] = Lane(
                lane_name(key, stripe),
                device=device,
                chunk_bytes=None if cut else _UNCUT,  # cut only to overlap receive and broadcast
                p2p=groups[lane_name(key, stripe)] if is_end else None,
                stage=groups.get(stage_name(key, node, stripe)),
                stage_root=stripe.target,
                timeout=timeout,
                transport=None if transport is None else transport.handle,
            )
        return created[key, stripe]

    endpoints = {}
    for channel, key in by_lane.items():
        if node not in (channel.source, channel.target):
            continue
        sends = channel.source == node
        peers = topology.ranks_of(channel.target if sends else channel.source)
        ends = {}
        for stripe, there in _own_stripes(transfers.stripes(channel), sends, tp_rank):
            peer = None if there is None else members[lane_name(key, stripe)].index(peers[there])
            ends[stripe] = StripeEnd(lane_of(key, stripe, there is not None), peer)
        if ends:
            endpoints[channel] = Endpoint(
                channel,
                ends,
                tp_rank,
                transfers.sizes(channel),
                sum(not stripe.direct for stripe in transfers.stripes(channel)),
                transfers.scatter_from(channel),
                sends,
                compressions.scheme(channel),
            )
    return endpoints


def _own_stripes(stripes: Sequence[Stripe], sends: bool, tp_rank: int) -> Iterator[tuple[Stripe, int | None]]:
    """The stripes that end on ``tp_rank``, with the rank at the other end; None if it only joins the broadcast."""
    for stripe in stripes:
        here, there = stripe[:2] if sends else (stripe.target, stripe.source)
        if tp_rank == here:
            yield stripe, there
        elif not (sends or stripe.direct):
            yield stripe, None
