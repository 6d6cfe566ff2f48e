"""Hypothesis strategies for the property tests of the planner."""

from hypothesis import strategies as st

from ldt.plan import Action, Costs, Kind, Plan
from ldt.plan.planner.policy import Limits, Policy
from ldt.topology import Node, Topology

_BUFFERS = st.none() | st.integers(1, 3)


@st.composite
def costs_of(draw, topology):
    times = st.one_of(st.just(0.0), st.floats(0.01, 3))
    chunks, hops = topology.num_chunks, topology.num_chunks - 1
    forward, backward = (draw(st.lists(times, min_size=chunks, max_size=chunks)) for _ in range(2))
    latency, size, other = (draw(st.lists(times, min_size=hops, max_size=hops)) for _ in range(3))
    bandwidth = draw(st.sampled_from([None, 1.0, {"up": 1.0, "down": 0.5}]))
    sizes = draw(st.sampled_from([size, {"forward": size, "backward": other}]))
    return Costs(forward, backward, latency=latency, bandwidth=bandwidth, bytes=sizes)


@st.composite
def policies(draw, replica_costs, microbatches, buffers=_BUFFERS):
    """Draw any priorities and windows, none of them strict: such policies never deadlock."""
    kinds = [Kind.F, Kind.B] if replica_costs.weight is None else [Kind.F, Kind.I, Kind.W]
    priorities = tuple(
        tuple(draw(st.permutations([(c, kind) for c in replica_costs.chunks_of(stage) for kind in kinds])))
        for stage in range(replica_costs.num_stages)
    )
    windows = tuple(draw(st.integers(1, microbatches)) for _ in range(replica_costs.num_chunks))
    return Policy(windows, (False,) * replica_costs.num_chunks, priorities, Limits(buffers=draw(buffers)))


@st.composite
def topologies(draw, min_stages=1, max_stages=4, max_laps=2, max_edge_dp=2, max_served=3, placed=False):
    """Draw topologies with one rank per node; an edge replica serves up to ``max_served`` cloud replicas.

    ``placed``: half of them place their chunks in any order.
    """
    stages, edge_dp = draw(st.integers(min_stages, max_stages)), draw(st.integers(1, max_edge_dp))
    served = draw(st.integers(1, max_served)) if stages > 1 else 1
    cloud = st.lists(st.sampled_from([1, 2, "far"]), min_size=stages - 1, max_size=stages - 1)
    sites = draw(st.none() | cloud.map(lambda others: [0, *others]))
    if placed and draw(st.booleans()):
        placement = draw(placements(stages))
        return Topology([1] * stages, edge_dp * served, edge_dp, sites=sites, placement=placement)
    return Topology([1] * stages, edge_dp * served, edge_dp, draw(st.integers(1, max_laps)), sites)


@st.composite
def placements(draw, stages):
    """Draw a stage for each chunk, such that paired lanes can be used: no hop between two even cloud stages."""
    more = draw(st.lists(st.integers(0, stages - 1), max_size=3))
    placement = [0]
    for stage in draw(st.permutations([*range(1, stages), *more])):
        if stage != placement[-1] and stage % 2 == placement[-1] % 2:
            placement.append(0)
        placement.append(stage)
    return [*placement, 0]


@st.composite
def any_compute_plan(draw):
    """Draw a valid compute-only plan in random order: repeatedly any possible action of any node.

    A reduction is one action of all replicas together.
    """
    topology = draw(topologies(max_laps=3, placed=True))
    microbatches, training = draw(st.integers(1, 4 if topology.dp < 3 else 3)), draw(st.booleans())
    random = draw(st.randoms(use_true_random=False))
    kinds = (Kind.F, Kind.B) if training else (Kind.F,)
    left = {
        (Action(chunk, kind, m), topology.cloud_replica(Node(0, edge), m))
        for chunk in range(topology.num_chunks)
        for kind in kinds
        for edge in range(topology.edge_dp)
        for m in range(microbatches)
    }
    if training:
        left |= {
            (Action(chunk, Kind.REDUCE_GRAD), None)
            for chunk in range(topology.num_chunks)
            if topology.replicas(topology.stage_of(chunk)) > 1
        }
    rows: dict[Node, list[Action]] = {node: [] for node in topology.nodes}
    while left:
        possible = [
            item for item in left if not any(need in left for need in _needs(topology, microbatches, *item))
        ]
        action, replica = random.choice(sorted(possible, key=str))
        for owner in range(topology.dp) if replica is None else (replica,):
            row = rows[topology.node_at(action.chunk, owner)]
            if action not in row:  # edge nodes serve several replicas
                row.append(action)
        left.remove((action, replica))
    return Plan(topology, microbatches, rows, None, training)


def _needs(topology, microbatches, action, replica):
    chunk, kind, microbatch = action
    if kind is Kind.F:
        return [(Action(chunk - 1, Kind.F, microbatch), replica)]
    if kind is Kind.B:
        return [
            (Action(chunk, Kind.F, microbatch), replica),
            (Action(chunk + 1, Kind.B, microbatch), replica),
        ]
    return [(Action(chunk, Kind.B, m), r) for m in range(microbatches) for r in range(topology.dp)]
