"""Lists the process groups of a mesh in one global order, and creates them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ldt._torch_private import make_process_group
from ldt.runtime.comm.transfer_modes import LEADERS, Stripe, Transfers
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
_EDGE_BROADCAST = "control/edge_broadcast"
GLOO = "gloo"
# The lanes and the control plane enforce timeouts of gloo operations themselves, never the group.
_NO_LIMIT = timedelta(days=30)


class GroupSpec(NamedTuple):
    """A process group to create: its name within the mesh, and its members as ranks of the topology."""

    name: str
    ranks: tuple[int, ...]


def control_name(node: Node) -> str:
    """The control group of one node's ranks."""
    return f"{CONTROL}/{node}"


def edge_broadcast_name(replica: int) -> str:
    """The group of all leaders for the broadcasts of one edge replica."""
    return f"{_EDGE_BROADCAST}/{replica}"


def is_control(name: str) -> bool:
    """Whether a group belongs to the control plane, which always uses gloo."""
    return name.startswith(f"{CONTROL}/")


def tp_name(stage: int, replica: int) -> str:
    """The group of one node's ranks, for the model's layers."""
    return f"tp/{stage}.{replica}"


def dp_name(stage: int, tp_rank: int) -> str:
    """The group of the ranks with one ``tp_rank`` in all replicas of a stage."""
    return f"dp/{stage}.{tp_rank}"


def lane_name(key: LaneKey, stripe: Stripe = LEADERS) -> str:
    """The point-to-point group of a stripe of a lane."""
    name = f"lane/{key}" if stripe == LEADERS else f"lane/{key}/{stripe.source}-{stripe.target}"
    return f"{name}/direct" if stripe.direct else name


def stage_name(key: LaneKey, node: Node, stripe: Stripe = LEADERS) -> str:
    """The group that broadcasts a stripe within a receiving node."""
    return f"{lane_name(key, stripe)}/stage/{node}"


def group_specs(topology: Topology, policy: LanePolicy, transfers: Transfers) -> tuple[GroupSpec, ...]:
    """Every group of more than one rank, in the order in which all ranks create theirs.

    Each stripe of a lane has groups of its own, apart from those of the model's layers: one of its ends for point to
    point, and one per receiving stage for the broadcast.
    """
    specs = [*control_groups(topology), *model_groups(topology), *_lane_groups(topology, policy, transfers)]
    return tuple(spec for spec in specs if len(spec.ranks) > 1)


def control_groups(topology: Topology) -> tuple[GroupSpec, ...]:
    """The ranks of each node, then the leaders, then the leaders again for each edge replica."""
    nodes = [GroupSpec(control_name(node), topology.ranks_of(node)) for node in topology.nodes]
    leaders = tuple(map(topology.leader_of, topology.nodes))
    broadcasts = (GroupSpec(edge_broadcast_name(replica), leaders) for replica in range(topology.edge_dp))
    return *nodes, GroupSpec(LEADERS_CONTROL, leaders), *broadcasts


def model_groups(topology: Topology) -> tuple[GroupSpec, ...]:
    """The groups of more than one rank that layers and reductions use, in the order of their connection."""
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
    """Create the group of the global ``ranks``, which include this process. Only they take part, over ``store``.

    ``name`` must be unique for the life of the store. ``dist.new_group(use_local_synchronization=True)`` would not
    do: it names a group by the number of groups that the process has, which differs between the ranks of a mesh, so
    they would wait for each other under different names.
    Raises the backend's error if a member is missing after ``timeout``. Operations of a gloo group have no timeout,
    those of other backends have ``timeout`` until ``set_timeout`` changes it.
    """
    group = make_process_group(name, ranks, backend, timeout, store)
    if backend == GLOO:
        group.set_timeout(_NO_LIMIT)
    return group


_meshes = itertools.count(1)


def unique_dims() -> tuple[str, str]:
    """Unique dimension names for replicas and for the ranks of a node: "dp" and "tp", then "dp_2" and "tp_2" and so on.

    torch treats device meshes with equal ranks and names as one, and DTensor's caches keep the groups of the first,
    which may have been destroyed.
    """
    number = next(_meshes)
    return ("dp", "tp") if number == 1 else (f"dp_{number}", f"tp_{number}")
