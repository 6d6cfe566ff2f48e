"""verify accepts exactly the plans that an independent verifier accepts, on random plans, most of them broken."""

import re

from brute_force import works
from hypothesis import event, given
from hypothesis import strategies as st
from strategies import topologies

from ldt.errors import PlanError
from ldt.plan import Action, Kind, ushape, verify


@st.composite
def shuffled_plan(draw, movable):
    """Draw a valid plan in which a few actions were swapped with others of their row, mostly nearby ones."""
    policy = draw(st.sampled_from(["dedicated", "paired"]))
    plan = ushape(
        draw(topologies(min_stages=2)),
        draw(st.integers(1, 5)),
        training=draw(st.booleans()),
        lanes=policy,
        receive_buffers=draw(st.integers(1, 3)),
    )
    rows = {node: list(row) for node, row in plan.rows.items()}
    for _ in range(draw(st.integers(0, 4))):
        row = rows[draw(st.sampled_from(list(rows)))]
        places = [place for place, action in enumerate(row) if movable(action)]
        if not places:  # a cloud replica may have no microbatch
            continue
        first = draw(st.integers(0, len(places) - 1))
        second = min(first + draw(st.integers(1, 3)), len(places) - 1)
        one, other = places[first], places[second]
        row[one], row[other] = row[other], row[one]
    return plan.with_rows(rows, policy)


@st.composite
def plan_with_scattered_receives(draw):
    """Scatter each channel's receives, in order and in time: valid if dedicated, maybe not if paired."""
    plan = ushape(
        draw(topologies(min_stages=2, max_edge_dp=1)),
        draw(st.integers(1, 4)),
        training=draw(st.booleans()),
        lanes=draw(st.sampled_from(["dedicated", "paired"])),
    )
    random = draw(st.randoms(use_true_random=False))
    rows = {}
    for node, row in plan.rows.items():
        rest = [action for action in row if not action.kind.is_receive]
        limits: dict[object, int] = {}
        placed: list[tuple[int, Action]] = []
        for action in reversed([action for action in row if action.kind.is_receive]):
            user = Action(action.chunk, Kind(action.kind.direction), action.microbatch)
            channel = (action.chunk, action.kind)
            place = random.randint(0, min(rest.index(user), limits.get(channel, len(rest))))
            limits[channel] = place
            placed.append((place, action))
        rows[node] = []
        for gap in range(len(rest) + 1):
            rows[node] += [action for place, action in reversed(placed) if place == gap] + rest[gap : gap + 1]
    return plan.with_rows(rows, plan.lanes)


@st.composite
def plan_with_scattered_reductions(draw):
    """Scatter reductions after their backwards, in one order for all replicas: valid, or a deadlock."""
    plan = ushape(
        draw(topologies(max_stages=3).filter(lambda topology: topology.dp > 1)),
        draw(st.integers(1, 2)),
        lanes=draw(st.sampled_from(["dedicated", "paired"])),
    )
    random = draw(st.randoms(use_true_random=False))
    topology = plan.topology
    chunks = [topology.chunks_of(s) if topology.replicas(s) > 1 else () for s in range(topology.num_stages)]
    orders = [random.sample(of_stage, len(of_stage)) for of_stage in chunks]
    rows = {}
    for node, row in plan.rows.items():
        rows[node] = [action for action in row if action.kind is not Kind.REDUCE_GRAD]
        after = 0
        for chunk in orders[node.stage]:
            share = topology.microbatches_of(node, plan.num_microbatches)
            last = rows[node].index(Action(chunk, Kind.B, share[-1])) if share else -1
            place = random.choice(
                [max(after, last + 1), random.randint(max(after, last + 1), len(rows[node]))]
            )
            rows[node].insert(place, Action(chunk, Kind.REDUCE_GRAD))
            after = place + 1
    return plan.with_rows(rows, plan.lanes)


def proven(plan):
    try:
        verify(plan)
    except PlanError as error:
        event(re.sub(r"[^a-z ]+", "#", str(error).splitlines()[0]))  # shown by --hypothesis-show-statistics
        return False
    event("accepted")
    return True


@given(shuffled_plan(lambda action: not action.kind.is_compute))
def test_verify_agrees_with_brute_force_on_swapped_communication(plan):
    assert proven(plan) == works(plan, plan.lanes)


@given(shuffled_plan(lambda action: True))
def test_verify_agrees_with_brute_force_on_swapped_actions(plan):
    assert proven(plan) == works(plan, plan.lanes)


@given(plan_with_scattered_receives())
def test_verify_agrees_with_brute_force_on_scattered_receives(plan):
    accepted = proven(plan)
    assert accepted == works(plan, plan.lanes)
    assert accepted or plan.lanes == "paired"


@given(plan_with_scattered_reductions())
def test_verify_agrees_with_brute_force_on_scattered_reductions(plan):
    assert proven(plan) == works(plan, plan.lanes)


@given(
    topologies(max_stages=6, max_edge_dp=3),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["dedicated", "paired"]),
)
def test_brute_force_accepts_ushape(topology, microbatches, training, policy):
    assert works(ushape(topology, microbatches, training=training, lanes=policy), policy)
