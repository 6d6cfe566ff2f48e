"""Broken plans are refused, and the error marks the action."""

import re

import pytest

from ldt.errors import PlanError
from ldt.plan import Action, Kind, Plan, add_grad_reduction, remove_communication, ushape, verify
from ldt.topology import Node, Topology

EDGE, CLOUD, LAST = Node(0, 0), Node(1, 0), Node(2, 0)


def parse(*texts):
    return [Action.parse(text) for text in texts]


class Broken:
    """A plan of four microbatches, to be broken."""

    def __init__(self, stages=3, dp=1, lanes="dedicated"):
        self.plan = ushape(Topology([1] * stages, dp=dp), 4, lanes=lanes)
        self.rows = {node: list(row) for node, row in self.plan.rows.items()}

    def swap(self, node, *texts):
        row, (one, other) = self.rows[node], parse(*texts)
        first, second = row.index(one), row.index(other)
        row[first], row[second] = row[second], row[first]

    def move(self, node, text, *, before):
        row, (action, goal) = self.rows[node], parse(text, before)
        row.remove(action)
        row.insert(row.index(goal), action)

    def error(self):
        with pytest.raises(PlanError) as caught:
            verify(self.plan.with_rows(self.rows, self.plan.lanes))
        return str(caught.value)


@pytest.fixture
def broken():
    return Broken()


def test_swapped_receives(broken):
    broken.swap(CLOUD, "1RECV_F0", "1RECV_F1")
    error = broken.error()
    assert error.startswith(
        "lane F0.0: node 0.0 sends microbatch 0 of F0:0.0->1.0, "
        "where node 1.0 receives microbatch 1 of F0:0.0->1.0\n"
    )
    assert ">0SEND_F0<" in error
    assert ">1RECV_F1<" in error


def test_missing_send(broken):
    broken.rows[CLOUD].remove(Action.parse("1SEND_F2"))
    error = broken.error()
    assert error.startswith("node 1.0 lacks 1SEND_F2\n")
    assert ">1F2<" in error


def test_missing_receive(broken):
    broken.rows[EDGE].remove(Action.parse("0RECV_B1"))
    assert broken.error().startswith("node 0.0 lacks 0RECV_B1\n")


def test_missing_compute(broken):
    broken.rows[LAST].remove(Action.parse("2B3"))
    assert broken.error().startswith("node 2.0 lacks 2B3\n")


def test_backward_before_its_forward(broken):
    broken.swap(CLOUD, "1F2", "1B2")
    error = broken.error()
    assert error.startswith("node 1.0 has 1B2 before 1F2, which it needs\n")
    assert ">1B2<" in error


def test_send_before_its_compute(broken):
    broken.swap(CLOUD, "1F2", "1SEND_F2")
    assert broken.error().startswith("node 1.0 has 1SEND_F2 before 1F2, which it needs\n")


def test_compute_before_its_receive(broken):
    broken.swap(LAST, "2RECV_F0", "2F0")
    assert broken.error().startswith("node 2.0 has 2F0 before 2RECV_F0, which it needs\n")


def test_duplicate(broken):
    broken.rows[CLOUD].append(Action.parse("1F2"))
    error = broken.error()
    place = broken.rows[CLOUD].index(Action.parse("1F2"))
    assert error.startswith(f"node 1.0 has 1F2 twice, first as action {place}\n")
    assert error.endswith(">1F2<")


def test_local_order_on_one_stage():
    plan = remove_communication(ushape(Topology([1]), 2))
    row = list(plan.rows[EDGE])
    row.remove(Action.parse("1F0"))
    row.insert(0, Action.parse("1F0"))
    with pytest.raises(PlanError, match=r"node 0\.0 has 1F0 before 0F0, which it needs"):
        verify(plan.with_rows({EDGE: row}, None))


def test_cyclic_wait(broken):
    """The edge waits for gradient 0 before it sends 3, which cloud 1.0 receives before it sends that gradient."""
    broken.move(EDGE, "0F3", before="0B1")
    broken.move(EDGE, "0SEND_F3", before="0B1")
    broken.move(CLOUD, "1F3", before="1B0")
    broken.move(CLOUD, "1SEND_F3", before="1B0")
    broken.move(CLOUD, "1RECV_F3", before="1F3")
    error = broken.error()
    assert error.startswith("deadlock: 3 of 3 nodes are stuck\n")
    assert "node 0.0 waits at 0B0 for microbatch 0 of B0:1.0->0.0, which node 1.0 has not sent\n" in error
    assert "node 1.0 waits at 1F3 for microbatch 3 of F0:0.0->1.0, which node 0.0 has not sent\n" in error
    assert re.search(r"^ +0\.0 \|.*>0B0<", error, re.MULTILINE)
    assert re.search(r"^ +1\.0 \|.*>1F3<", error, re.MULTILINE)


def test_head_of_line_on_a_paired_lane():
    """Every channel keeps its order, but the head of the shared lane's queue blocks it."""
    broken = Broken(stages=4, lanes="paired")
    broken.swap(CLOUD, "1RECV_B0", "1RECV_F3")
    error = broken.error()
    assert error.startswith("deadlock: 4 of 4 nodes are stuck\n")
    wait = "node 1.0 waits at 1F3 for microbatch 3 of F0:0.0->1.0"
    assert f"{wait}, which is behind microbatch 0 of B1:2.0->1.0 on lane pang.0 at node 1.0\n" in error


def test_order_of_a_paired_lane_between_two_nodes():
    """With two stages, one lane carries the edge's activations and its gradients to the same node."""
    plan = ushape(Topology([1, 1]), 4, lanes="paired")
    row = list(plan.rows[CLOUD])
    first, second = row.index(Action.parse("1RECV_F2")), row.index(Action.parse("1RECV_B0"))
    row[first], row[second] = row[second], row[first]
    with pytest.raises(
        PlanError, match=r"lane pang\.0: node 0\.0 sends microbatch \d of \S+, where node 1\.0"
    ):
        verify(plan.with_rows({**plan.rows, CLOUD: row}, "paired"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9F0", "there is no chunk 9, chunks are 0 to 3"),
        ("2F0", "chunk 2 is on stage 2"),
        ("1F4", "microbatches are 0 to 3"),
        ("1REDUCE_GRAD", "stage 1 has one replica, so there is nothing to reduce"),
    ],
)
def test_actions_that_cannot_be_there(broken, text, reason):
    broken.rows[CLOUD].append(Action.parse(text))
    assert broken.error().startswith(f"node 1.0 cannot run {text}: {reason}\n")


@pytest.mark.parametrize("action", [Action(1, Kind.F), Action(1, Kind.REDUCE_GRAD, 0)])
def test_microbatch_where_it_belongs(broken, action):
    broken.rows[CLOUD].append(action)
    assert "REDUCE_GRAD has no microbatch, every other action has one" in broken.error()


def test_messages_nobody_needs(broken):
    broken.rows[EDGE].append(Action.parse("0RECV_F0"))
    assert "node 0.0 cannot run 0RECV_F0: the neighbouring chunk is not on another node" in broken.error()


def test_backward_in_a_forward_only_plan():
    plan = ushape(Topology([1, 1]), 2, training=False)
    rows = {**plan.rows, CLOUD: [*plan.rows[CLOUD], Action.parse("1B0")]}
    with pytest.raises(PlanError, match=r"node 1\.0 cannot run 1B0: this plan is forward-only"):
        verify(plan.with_rows(rows, plan.lanes))


def test_communication_in_a_plan_without():
    plan = ushape(Topology([1, 1]), 2)
    with pytest.raises(PlanError, match=r"this plan has no communication \(lanes=None\)"):
        verify(plan.with_rows(plan.rows, None))


def test_reductions():
    broken = Broken(dp=2)
    broken.rows[CLOUD].remove(Action.parse("1REDUCE_GRAD"))
    assert broken.error().startswith("node 1.0 lacks 1REDUCE_GRAD: use add_grad_reduction\n")
    broken = Broken(dp=2)
    broken.swap(CLOUD, "1REDUCE_GRAD", "1B2")
    assert broken.error().startswith("node 1.0 has 1REDUCE_GRAD before ")
    broken = Broken(dp=2)
    row = broken.rows[Node(0, 1)]
    row.remove(Action.parse("3REDUCE_GRAD"))
    row.append(Action.parse("3REDUCE_GRAD"))
    assert broken.error().startswith(
        "all replicas of a stage must reduce its chunks in the same order: "
        "node 0.1 has 0REDUCE_GRAD where node 0.0 has 3REDUCE_GRAD\n"
    )


def test_reductions_that_wait_for_each_other():
    """Replica 1 of the edge waits for replica 0, which waits for a gradient after a reduction of the cloud."""
    broken = Broken(stages=2, dp=2)
    broken.move(CLOUD, "1REDUCE_GRAD", before="1SEND_B3")
    broken.move(Node(0, 1), "2REDUCE_GRAD", before="2SEND_B3")
    broken.move(EDGE, "2REDUCE_GRAD", before="0REDUCE_GRAD")
    error = broken.error()
    assert error.startswith("deadlock: 4 of 4 nodes are stuck\n")
    assert "node 0.0 waits at 0B3 for microbatch 3 of B0:1.0->0.0, which node 1.0 has not sent\n" in error
    assert "node 0.1 waits at 2REDUCE_GRAD for node 0.0 to reach it\n" in error
    assert "node 1.0 waits at 1REDUCE_GRAD for node 1.1 to reach it\n" in error
    assert re.search(r"^ +0\.1 \|.*>2REDUCE_GRAD<", error, re.MULTILINE)


def test_split_backward_is_one_of_two_forms():
    plan = remove_communication(ushape(Topology([1, 1]), 2))
    rows = {}
    for node, row in plan.rows.items():
        rows[node] = []
        for action in row:
            split = [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
            rows[node] += split if action.kind is Kind.B else [action]
    verify(plan.with_rows(rows, None))
    row = rows[CLOUD]
    with pytest.raises(PlanError, match=r"node 1\.0 has both 1B0 and 1I0: a backward is either split or not"):
        verify(plan.with_rows({**rows, CLOUD: [*row, Action.parse("1B0")]}, None))
    place = row.index(Action.parse("1W0"))
    row[place - 1], row[place] = row[place], row[place - 1]
    with pytest.raises(PlanError, match=r"node 1\.0 has 1W0 before 1I0, which it needs"):
        verify(plan.with_rows(rows, None))
    row.remove(Action.parse("1W0"))
    with pytest.raises(PlanError, match=r"node 1\.0 lacks 1W0"):
        verify(plan.with_rows(rows, None))


def test_another_policy_than_the_plans_own():
    plan = ushape(Topology([1, 1, 1]), 4, lanes="paired")
    verify(plan, "dedicated")
    with pytest.raises(PlanError, match="no communication yet"):
        verify(remove_communication(plan), "paired")


def test_a_microbatch_of_another_replica():
    plan = ushape(Topology([1, 1], dp=2, edge_dp=1), 4)
    rows = {node: list(row) for node, row in plan.rows.items()}
    rows[CLOUD][rows[CLOUD].index(Action.parse("1F2"))] = Action.parse("1F1")
    reason = r"of the 4 microbatches of its edge replica, dealt to 2 cloud replicas in turn, it has 0, 2\n"
    with pytest.raises(PlanError, match=f"node 1.0 cannot run 1F1: {reason}"):
        verify(plan.with_rows(rows, plan.lanes))
    rows[CLOUD] = [action for action in plan.rows[CLOUD] if action.microbatch != 2]
    with pytest.raises(PlanError, match=r"node 1\.0 lacks 1F2"):
        verify(plan.with_rows(rows, plan.lanes))


def test_replicas_that_share_an_edge_wait_for_each_other():
    """The edge does all work for replica 0 first, which reduces chunk 3 before it sends the gradient the edge needs."""
    topology = Topology([1, 1], dp=2, edge_dp=1, laps=2)
    rows = {
        Node(0, 0): "0F0 2F0 4F0 4B0 2B0 0B0 0F1 2F1 4F1 4B1 2B1 0B1",
        Node(1, 0): "1F0 3F0 3B0 3REDUCE_GRAD 1B0 1REDUCE_GRAD",
        Node(1, 1): "1F1 3F1 3B1 3REDUCE_GRAD 1B1 1REDUCE_GRAD",
    }
    plan = Plan(topology, 2, {node: list(map(Action.parse, row.split())) for node, row in rows.items()})
    with pytest.raises(PlanError, match="deadlock: 3 of 3 nodes") as caught:
        verify(plan)
    assert "node 1.0 waits at 3REDUCE_GRAD for node 1.1 to reach it\n" in str(caught.value)


@pytest.mark.parametrize("lanes", ["dedicated", "paired"])
@pytest.mark.parametrize(("dp", "edge_dp", "num_microbatches"), [(2, 2, 3), (2, 1, 4), (3, 1, 9), (4, 2, 8)])
@pytest.mark.parametrize(("stages", "laps"), [(2, 1), (3, 1), (3, 2), (4, 1)])
def test_the_fixed_order_keeps_replicas_in_step(stages, laps, dp, edge_dp, num_microbatches, lanes):
    topology = Topology([1] * stages, dp=dp, edge_dp=edge_dp, laps=laps)
    verify(ushape(topology, num_microbatches, lanes=lanes), lockstep=range(stages))


def test_replicas_in_step_wait_for_one_another():
    """The edge does all work for replica 0 before any for replica 1, which replica 0 waits for in its first forward."""
    topology = Topology([1, 1], dp=2, edge_dp=1)
    edge = parse(*(text for m in (0, 1) for text in (f"0F{m}", f"2F{m}", f"2B{m}", f"0B{m}")))
    plan = Plan(topology, 2, {EDGE: edge, CLOUD: parse("1F0", "1B0"), Node(1, 1): parse("1F1", "1B1")})
    plan = add_grad_reduction(plan)
    verify(plan)
    with pytest.raises(PlanError, match=r"node 1\.0 waits at 1F0 for node 1\.1 to reach it"):
        verify(plan, lockstep=[1])


def test_replicas_in_step_do_equally_much():
    plan = ushape(Topology([1, 1], dp=2, edge_dp=1), 3)
    verify(plan, lockstep=[0])
    with pytest.raises(
        PlanError, match="must be a multiple of the 2 cloud replicas that each edge replica serves"
    ):
        verify(plan, lockstep=[1])
