"""Passes messages from the stage of a cloud chunk to the stage of the next chunk, which may be the edge or the same.

A message from the first stage of the cloud to the edge crosses the link between two sites once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.comm.group_layout import edge_broadcast_name
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.control.collectives import Collectives
from ldt.runtime.control.edge_messages import EdgeMessage, Inbox, Outbox, Subject
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.topology import Node

__all__ = ["StageChain", "make_stage_chain"]


class StageChain:
    """This rank's ends: ``outboxes`` by target stage on a stage's first leader, ``inboxes`` by source stage."""

    def __init__(
        self,
        rank_info: RankInfo,
        collectives: Collectives,
        detector: FailureDetector,
        outboxes: Mapping[int, Outbox],
        inboxes: Mapping[int, Inbox],
    ) -> None:
        self.outboxes = outboxes
        self.inboxes = inboxes
        self._rank_info = rank_info
        self._collectives = collectives
        self._detector = detector

    def source(self, stage: int) -> int:
        """The global rank that sends the messages of ``stage``."""
        return self._rank_info.ranks[self._rank_info.topology.leader_of(Node(stage, 0))]

    def send(self, message: EdgeMessage, target: int) -> None:
        """Send a message to all leaders of stage ``target``. Does nothing on other ranks than the stage's first."""
        if target in self.outboxes:
            self.outboxes[target].send(message)

    def receive(self, source: int, own: EdgeMessage) -> EdgeMessage:
        """The next message of stage ``source``, on the sender itself ``own``. A collective call of the ranks of a node.

        Waits without a timeout. Raises RemoteStageError if the mesh fails.
        """
        data = b""
        if source in self.inboxes:
            what = f"shapes of hops from rank {self.source(source)}"
            data = self.inboxes[source].await_next(Subject.SHAPES, what, self._detector).to_bytes()
        elif self._rank_info.is_leader:
            data = own.to_bytes()
        return EdgeMessage.from_bytes(self._collectives.broadcast_in_node(data, no_timeout=True))


def make_stage_chain(
    rank_info: RankInfo,
    collectives: Collectives,
    detector: FailureDetector,
    groups: Mapping[str, dist.ProcessGroup],
) -> StageChain:
    """Create this rank's ends, and post the first receives.

    They are in the group of the first edge replica's broadcasts, in which only that replica sends otherwise.
    """
    outboxes: dict[int, Outbox] = {}
    inboxes: dict[int, Inbox] = {}
    topology, node, nodes = rank_info.topology, rank_info.node, rank_info.topology.nodes
    for source, target in sorted(set(pairwise(topology.placement))):
        if source == 0 or not rank_info.is_leader:
            continue
        first, name = Node(source, 0), f"chain/{source}-{target}"
        receivers = [number for number, other in enumerate(nodes) if other.stage == target and other != first]
        if receivers and (node == first or nodes.index(node) in receivers):
            lane = Lane(name, p2p=groups[edge_broadcast_name(0)], stage=None, timeout=math.inf)
            if node == first:
                outboxes[target] = Outbox(lane, receivers)
            else:
                inboxes[source] = Inbox(lane, nodes.index(first))
    return StageChain(rank_info, collectives, detector, outboxes, inboxes)
