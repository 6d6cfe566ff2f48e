"""What the property tests of the planner draw from."""

from hypothesis import strategies as st

from ldt.plan import Costs, Kind
from ldt.plan.list_scheduler import Limits, Rules

_BUFFERS = st.none() | st.integers(1, 3)


@st.composite
def costs_of(draw, topology):
    times = st.one_of(st.just(0.0), st.floats(0.01, 3))
    chunks, hops = topology.num_chunks, topology.num_chunks - 1
    forward, backward = (draw(st.lists(times, min_size=chunks, max_size=chunks)) for _ in range(2))
    latency, size = (draw(st.lists(times, min_size=hops, max_size=hops)) for _ in range(2))
    return Costs(forward, backward, latency=latency, bandwidth=draw(st.sampled_from([None, 1.0])), bytes=size)


@st.composite
def rules_of(draw, chain, microbatches, buffers=_BUFFERS):
    """Any priorities and windows, none of them strict: such rules always come to an end."""
    kinds = [Kind.F, Kind.B] if chain.weight is None else [Kind.F, Kind.I, Kind.W]
    priorities = tuple(
        tuple(draw(st.permutations([(c, kind) for c in chain.chunks_of(stage) for kind in kinds])))
        for stage in range(chain.num_stages)
    )
    windows = tuple(draw(st.integers(1, microbatches)) for _ in range(chain.num_chunks))
    return Rules(windows, (False,) * chain.num_chunks, priorities, Limits(buffers=draw(buffers)))
