"""Passes messages from each cloud stage to the next one, and from the last to the edge.

A message from the first stage of the cloud to the edge crosses the link between two sites once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist

from ldt._C import Lane
from ldt.runtime.comm.group_layout import edge_broadcast_name
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.control.collectives import Collectives
from ldt.runtime.control.edge_messages import EdgeMessage, Inbox, Outbox, Subject
from ldt.runtime.health.failure_detector import FailureDetector
from ldt.topology import Node

__all__ = ["StageRing", "make_stage_ring"]


class StageRing:
    """This rank's ends: the ``outbox`` of a cloud stage's first leader, and the ``inbox`` of all leaders behind it.

    The first stage of the cloud receives nothing, as it has no cloud stage before it.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        collectives: Collectives,
        detector: FailureDetector,
        outbox: Outbox | None,
        inbox: Inbox | None,
    ) -> None:
        self.outbox = outbox
        self.inbox = inbox
        self._collectives = collectives
        self._detector = detector
        topology = rank_info.topology
        before = Node((rank_info.stage - 1) % topology.num_stages, 0)
        self.source = rank_info.ranks[topology.leader_of(before)]

    def send(self, message: EdgeMessage) -> None:
        """Send a message to all leaders of the next stage. Does nothing on other ranks than the stage's first."""
        if self.outbox is not None:
            self.outbox.send(message)

    def receive(self) -> EdgeMessage:
        """The next message of the stage before, of global rank ``source``. A collective call of the ranks of a node.

        Waits without a timeout. Raises RemoteStageError if the mesh fails.
        """
        data = b""
        if self.inbox is not None:
            what = f"shapes of hops from rank {self.source}"
            data = self.inbox.await_next(Subject.SHAPES, what, self._detector).to_bytes()
        return EdgeMessage.from_bytes(self._collectives.broadcast_in_node(data, no_timeout=True))


def make_stage_ring(
    rank_info: RankInfo,
    collectives: Collectives,
    detector: FailureDetector,
    groups: Mapping[str, dist.ProcessGroup],
) -> StageRing:
    """Create this rank's ends, and post the first receives.

    They are in the group of the first edge replica's broadcasts, in which only that replica sends otherwise.
    """
    outbox: Outbox | None = None
    inbox: Inbox | None = None
    name, node, nodes = edge_broadcast_name(0), rank_info.node, rank_info.topology.nodes
    if rank_info.is_leader and rank_info.topology.num_stages > 1:
        if node.stage > 0 and node.replica == 0:
            target = (node.stage + 1) % rank_info.topology.num_stages
            peers = [number for number, other in enumerate(nodes) if other.stage == target]
            outbox = Outbox(Lane("ring/out", p2p=groups[name], stage=None, timeout=math.inf), peers)
        if node.stage != 1:
            source = nodes.index(Node((node.stage - 1) % rank_info.topology.num_stages, 0))
            inbox = Inbox(Lane("ring/in", p2p=groups[name], stage=None, timeout=math.inf), source)
    return StageRing(rank_info, collectives, detector, outbox, inbox)
