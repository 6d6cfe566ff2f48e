"""Which process groups a mesh needs, in one global order, and how one is made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ldt._torch_private import make_process_group
from ldt.runtime.comm.transfer import LEADERS, Stripe, Transfers
from ldt.topology import Channel, LaneKey, LanePolicy, Node, Topology, lanes

__all__ = [
    "GLOO",
    "LEADERS_CONTROL",
    "GroupSpec",
    "control_groups",
    "control_name",
    "dp_name",
    "edge_broadcast_name",
    "group_specs",
    "is_control",
    "lane_name",
    "make_group",
    "model_groups",
    "stage_name",
    "tp_name",
    "unique_dims",
]

CONTROL = "control"
LEADERS_CONTROL = "control/leaders"
_POST = "control/post"
GLOO = "gloo"
# Operations of a gloo group are limited by whoever waits for them (lanes, control plane), never by the group.
_NO_LIMIT = timedelta(days=30)


class GroupSpec(NamedTuple):
    """A process group to be: its name within the mesh and its members as ranks of the topology."""

    name: str
    ranks: tuple[int, ...]


def control_name(node: Node) -> str:
    """The ranks of one node, on the control plane."""
    return f"{CONTROL}/{node}"


def edge_broadcast_name(replica: int) -> str:
    """The leaders again, for what the leader of a replica of the edge tells them."""
    return f"{_POST}/{replica}"


def is_control(name: str) -> bool:
    """Whether a group is of the control plane, which is gloo whatever the lanes are."""
    return name.startswith(f"{CONTROL}/")


def tp_name(stage: int, replica: int) -> str:
    """The ranks of one node."""
    return f"tp/{stage}.{replica}"


def dp_name(stage: int, tp_rank: int) -> str:
    """The ranks at one place of a stage, in all replicas."""
    return f"dp/{stage}.{tp_rank}"


def lane_name(key: LaneKey, stripe: Stripe = LEADERS) -> str:
    """The leaders on a lane, or the ranks of its other strands."""
    name = f"lane/{key}" if stripe == LEADERS else f"lane/{key}/{stripe.source}-{stripe.target}"
    return f"{name}/direct" if stripe.direct else name


def stage_name(key: LaneKey, node: Node, stripe: Stripe = LEADERS) -> str:
    """The ranks of a node that hear what a strand of a lane brings."""
    return f"{lane_name(key, stripe)}/stage/{node}"


def group_specs(topology: Topology, policy: LanePolicy, transfers: Transfers) -> tuple[GroupSpec, ...]:
    """Every group of more than one rank, in the order in which all ranks create theirs.

    The groups of a strand of a lane are its own: its ends for point to point, and each receiving stage for the
    broadcast, apart from the group that the model's layers use.
    """
    specs = [*control_groups(topology), *model_groups(topology), *_lane_groups(topology, policy, transfers)]
    return tuple(spec for spec in specs if len(spec.ranks) > 1)


def control_groups(topology: Topology) -> tuple[GroupSpec, ...]:
    """The ranks of each node; the leaders; and these once more for each leader of the edge."""
    nodes = [GroupSpec(control_name(node), topology.ranks_of(node)) for node in topology.nodes]
    leaders = tuple(map(topology.leader_of, topology.nodes))
    posts = (GroupSpec(edge_broadcast_name(replica), leaders) for replica in range(topology.edge_dp))
    return *nodes, GroupSpec(LEADERS_CONTROL, leaders), *posts


def model_groups(topology: Topology) -> tuple[GroupSpec, ...]:
    """The groups of more than one rank that layers and reductions use, in the order in which they are connected."""
    specs = [GroupSpec(tp_name(*node), topology.ranks_of(node)) for node in topology.nodes]
    for stage, tp in enumerate(topology.tp):
        nodes = [node for node in topology.nodes if node.stage == stage]
        for tp_rank in range(tp):
            members = tuple(topology.ranks_of(node)[tp_rank] for node in nodes)
            specs.append(GroupSpec(dp_name(stage, tp_rank), members))
    return tuple(spec for spec in specs if len(spec.ranks) > 1)


def _lane_groups(topology: Topology, policy: LanePolicy, transfers: Transfers) -> Iterator[GroupSpec]:
    by_lane: dict[LaneKey, list[Channel]] = {}
    for channel, key in lanes(topology, policy).items():
        by_lane.setdefault(key, []).append(channel)
    for key, channels in by_lane.items():
        stripes = {channel: transfers.stripes(channel) for channel in channels}
        for stripe in sorted({stripe for found in stripes.values() for stripe in found}):
            carried = [channel for channel in channels if stripe in stripes[channel]]
            senders = {topology.ranks_of(channel.source)[stripe.source] for channel in carried}
            receivers = {topology.ranks_of(channel.target)[stripe.target] for channel in carried}
            yield GroupSpec(lane_name(key, stripe), tuple(sorted(senders | receivers)))
            for node in sorted({channel.target for channel in carried if not stripe.direct}):
                yield GroupSpec(stage_name(key, node, stripe), topology.ranks_of(node))


def make_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, store: Any
) -> dist.ProcessGroup:
    """Create the group of the global ``ranks``, of which this process is one; only they take part, over ``store``.

    ``name`` must be unique for the life of the store. ``dist.new_group(use_local_synchronization=True)`` would do
    but for the name it makes up: that counts the groups of the calling process, and ranks of one mesh have
    different numbers of groups, so that they would wait for each other under different names.
    Raises what the backend raises when a member is missing after ``timeout``. Operations of a gloo group have no
    limit, those of others have ``timeout`` until ``set_timeout`` gives them another.
    """
    group = make_process_group(name, ranks, backend, timeout, store)
    if backend == GLOO:
        group.set_timeout(_NO_LIMIT)
    return group


_meshes = itertools.count(1)


def unique_dims() -> tuple[str, str]:
    """Names of dimensions over replicas and over the ranks of a node: "dp" and "tp", then "dp_2" and "tp_2" and so on.

    torch takes two device meshes of equal ranks and names for one, and remembers in DTensor's caches the groups of the
    one that it met first, which may have been destroyed.
    """
    number = next(_meshes)
    return ("dp", "tp") if number == 1 else (f"dp_{number}", f"tp_{number}")
