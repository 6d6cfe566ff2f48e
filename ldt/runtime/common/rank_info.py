"""A rank's position in the topology, and the ranks it shares a node or a stage with."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ldt.site import Site
from ldt.topology import Node, Topology

__all__ = ["RankInfo"]


class RankInfo:
    """Position of one rank: ``rank`` is its index in the topology, ``ranks[rank]`` its global rank.

    The global rank ``store_rank`` is on the site of the store.
    """

    def __init__(self, topology: Topology, ranks: tuple[int, ...], rank: int, store_rank: int = 0) -> None:
        self.topology = topology
        self.ranks = ranks
        self.rank = rank
        self.store_rank = store_rank
        self.node: Node = topology.node_of(rank)
        self.tp_rank: int = topology.tp_rank_of(rank)

    @property
    def stage(self) -> int:
        return self.node.stage

    @property
    def replica(self) -> int:
        return self.node.replica

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node: with one stripe per channel, only it talks to other nodes."""
        return self.tp_rank == 0

    @property
    def is_edge(self) -> bool:
        return self.stage == 0

    def stage_of(self, global_rank: int) -> int:
        """The stage of a global rank of this mesh."""
        return self.node_of(global_rank).stage

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def node_of(self, global_rank: int) -> Node:
        """The node of a global rank of this mesh."""
        return self.topology.node_of(self.ranks.index(global_rank))

    def site_of(self, global_rank: int) -> Site:
        """The site of a global rank of this mesh."""
        return self.topology.sites[self.stage_of(global_rank)]

    def describe(self, global_rank: int) -> str:
        """How logs and errors name a rank: "rank 2 (stage 1, replica 0)"."""
        node = self.node_of(global_rank)
        return f"rank {global_rank} (stage {node.stage}, replica {node.replica})"

    @property
    def edge_replica(self) -> int:
        """The edge replica that this rank belongs to or computes for."""
        return self.replica % self.topology.edge_dp

    def edge_leader(self, replica: int) -> int:
        """Topology rank of the leader of an edge replica."""
        return self.topology.leader_of(Node(0, replica))

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The global ranks of this node."""
        return tuple(self.ranks[rank] for rank in self.topology.ranks_of(self.node))

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks with this rank's ``tp_rank`` in all replicas of its stage."""
        nodes = (Node(self.stage, replica) for replica in range(self.topology.replicas(self.stage)))
        return tuple(self.ranks[self.topology.ranks_of(node)[self.tp_rank]] for node in nodes)

    def spans_node(self, other: DeviceMesh) -> bool:
        """Whether ``other``, a device mesh with this rank, includes other ranks of its node."""
        return self._spans(other, self.node_ranks)

    def spans_replicas(self, other: DeviceMesh) -> bool:
        """Whether ``other``, a device mesh with this rank, includes its peers in other replicas."""
        return self._spans(other, self.replica_ranks)

    def _spans(self, other: DeviceMesh, ranks: tuple[int, ...]) -> bool:
        return bool((set(other.mesh.flatten().tolist()) & set(ranks)) - {self.ranks[self.rank]})
