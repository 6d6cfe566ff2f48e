"""Actions and plans print and parse exactly."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import topologies

import ldt.plan
from ldt.errors import PlanError
from ldt.plan import Action, Kind, Plan, ushape
from ldt.topology import Topology

GOLDEN = Path(__file__).parent.parent / "golden"

microbatched = st.builds(
    Action,
    st.integers(0, 999),
    st.sampled_from([kind for kind in Kind if kind is not Kind.REDUCE_GRAD]),
    st.integers(0, 9999),
)
actions = microbatched | st.builds(Action, st.integers(0, 999), st.just(Kind.REDUCE_GRAD), st.none())


@st.composite
def any_plan(draw):
    """Draw any rows: the text format does not require that a plan works."""
    topology = draw(topologies(placed=True))
    rows = {node: draw(st.lists(actions, max_size=6)) for node in topology.nodes}
    lanes = draw(st.sampled_from([None, "dedicated", "paired"]))
    return Plan(topology, draw(st.integers(1, 99)), rows, lanes, draw(st.booleans()))


@given(actions)
def test_action_round_trip(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F3", Action(2, Kind.F, 3)),
        ("1SEND_F3", Action(1, Kind.SEND_F, 3)),
        ("2RECV_F3", Action(2, Kind.RECV_F, 3)),
        ("10W0", Action(10, Kind.W, 0)),
        ("0REDUCE_GRAD", Action(0, Kind.REDUCE_GRAD)),
    ],
)
def test_action_text(text, action):
    assert str(action) == f"{action}" == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F3", "2F", "2X3", "0REDUCE_GRAD1", "2F3 4", "-1F0", "2f3", "1_0F0", "0F1_0", "+1F0"),
        *("\u0662F3", "2F\u0663", "2F\uff13"),  # digits of other scripts
        *("9" * 5000 + "F0", "0F" + "9" * 5000),
    ],
)
def test_action_refuses(text):
    with pytest.raises(PlanError, match="expected an action such as"):
        Action.parse(text)


def test_the_error_for_a_long_text_is_short():
    with pytest.raises(PlanError, match=r"got '9{40}\.\.\. \(5002 characters\)'"):
        Action.parse("9" * 5000 + "F0")


@given(microbatched.filter(lambda action: action.kind.is_comm and action.chunk > 0))
def test_counterpart_is_its_own_inverse(action):
    other = action.counterpart
    assert other.counterpart == action
    assert other.hop == action.hop
    assert other.kind.is_send != action.kind.is_send
    assert other.kind.direction == action.kind.direction


@given(microbatched.filter(lambda action: action.kind.is_comm and action.chunk > 0))
def test_send_of_is_the_send_across_a_hop(action):
    send = Action.send_of(action.hop, action.kind.direction, action.microbatch)
    assert send == (action if action.kind.is_send else action.counterpart)


def test_no_module_of_the_package_is_imported_lazily():
    """So imports have one direction: two modules that need each other could not both import at the top."""
    for file in Path(ldt.plan.__file__).parent.rglob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.lstrip() != line and "from ldt" in line], file


@given(any_plan())
def test_plan_round_trip(plan):
    again = Plan.from_text(plan.to_text())
    assert again == plan
    assert again.to_text() == plan.to_text()
    assert hash(again) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


GOLDEN_PLANS = {
    "stages3_laps1_mb4_dedicated_train": {"stages": 3, "laps": 1, "microbatches": 4},
    "stages4_laps2_mb8_paired_train": {"stages": 4, "laps": 2, "microbatches": 8, "lanes": "paired"},
    "stages3_laps1_mb4_paired_train": {"stages": 3, "laps": 1, "microbatches": 4, "lanes": "paired"},
    "stages2_laps1_mb3_dedicated_eval": {"stages": 2, "laps": 1, "microbatches": 3, "training": False},
    "stages2_laps2_mb2_paired_eval": {
        "stages": 2,
        "laps": 2,
        "microbatches": 2,
        "training": False,
        "lanes": "paired",
    },
    "stages2_laps1_mb2_dp2_train": {"stages": 2, "laps": 1, "microbatches": 2, "dp": 2},
    "stages3_laps1_mb5_dp2_edge1_train": {"stages": 3, "laps": 1, "microbatches": 5, "dp": 2, "edge_dp": 1},
}


def golden_plan(stages, laps, microbatches, dp=1, edge_dp=None, **options):
    return ushape(Topology([1] * stages, dp=dp, edge_dp=edge_dp, laps=laps), microbatches, **options)


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_plans(name):
    """To accept an intended change, run this file as a script and review the difference."""
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    plan = golden_plan(**GOLDEN_PLANS[name])
    assert plan.to_text() == text
    assert Plan.from_text(text) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace("# ldt plan 1", "plan"),
            "expected a plan that starts with '# ldt plan 1'",
        ),
        (lambda text: "", "expected a plan that starts with"),
        (lambda text: text.replace("tp=1,1", "tp=1,0"), r"header of the plan: tp\[1\] must be"),
        (lambda text: text.replace("mode=train", "mode=test"), "header of the plan: expected"),
        (lambda text: text.replace("microbatches=2", "microbatches=0"), "num_microbatches must be .* got 0"),
        (
            lambda text: text.replace("microbatches=2", "microbatches=1_0"),
            "header of the plan: expected '# micro",
        ),
        (lambda text: text.replace("microbatches=2", "microbatches=\u0662"), "header of the plan: expected"),
        (
            lambda text: text.replace("microbatches=2", "microbatches=" + "9" * 5000),
            "header of the plan: exp",
        ),
        (lambda text: text.replace("mode=train", "mode=train mode=eval"), "header of the plan: expected"),
        (lambda text: text.replace("mode=train", "mode=train color=red"), "header of the plan: expected"),
        (lambda text: text.replace(" mode=train", ""), "header of the plan: expected '# microbatches=4"),
        (
            lambda text: text.replace("laps=1", "laps=1 laps=2"),
            "header of the plan: expected a topology as 'tp=",
        ),
        (
            lambda text: text.replace("laps=1", "laps=1 x=2"),
            "header of the plan: expected a topology as 'tp=",
        ),
        (lambda text: text.replace("tp=1,1", "tp=1,1_0"), "header of the plan: expected a topology as 'tp="),
        (lambda text: text.replace("lanes=dedicated", "lanes=shared"), "lanes must be .* got 'shared'"),
        (lambda text: text.replace("1F1", "1G1"), "line 5 of the plan: expected an action .* got '1G1'"),
        (lambda text: text.replace("1.0,", "9" * 5000 + ".0,"), "line 5 of the plan: "),
        (lambda text: text.replace("1.0,", "0.0,"), "line 5 of the plan: node 0.0 already has a row"),
        (lambda text: text.rsplit("1.0,")[0], "expected rows for 0.0, 1.0, got 0.0"),
    ],
)
def test_bad_plan_texts_are_refused(change, message):
    text = ushape(Topology([1, 1]), 2).to_text()
    with pytest.raises(PlanError, match=message):
        Plan.from_text(change(text))


def test_only_sends_and_receives_have_a_channel():
    plan = ushape(Topology([1, 1], dp=2), 1)
    node = plan.topology.nodes[3]
    assert plan.channel_of(Action.parse("1RECV_F0"), node).name == "F0:0.1->1.1"
    with pytest.raises(PlanError, match="only sends and receives have a channel, got 1F0"):
        plan.channel_of(Action.parse("1F0"), node)


if __name__ == "__main__":
    for golden_name, shape in GOLDEN_PLANS.items():
        (GOLDEN / f"{golden_name}.txt").write_text(golden_plan(**shape).to_text(), encoding="utf-8")
