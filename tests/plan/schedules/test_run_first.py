"""Some microbatches first: a working plan of the same actions, whose first part needs no receive posted ahead."""

from brute_force import works
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_compute_plan

from ldt.plan import Costs, add_communication, optimize, ushape, verify
from ldt.plan.schedules.run_first import run_first
from ldt.topology import Topology


def first_turn(plan):
    """The first microbatch of each cloud replica."""
    return range(plan.topology.served)


@given(any_compute_plan(), st.sampled_from(["dedicated", "paired"]), st.integers(1, 3))
def test_any_plan_works_with_some_microbatches_first(plan, policy, receive_buffers):
    complete = add_communication(plan, policy, receive_buffers)
    if complete.num_microbatches % plan.topology.served:
        return
    changed = run_first(complete, first_turn(complete))
    verify(changed)
    assert works(changed, policy)
    for node, row in changed.rows.items():
        assert sorted(map(str, row)) == sorted(map(str, complete.rows[node]))
        left = [action for action in complete.rows[node] if action.microbatch not in first_turn(complete)]
        assert list(row[len(row) - len(left) :]) == left
    assert ends_if_every_action_waits(changed, first_turn(changed))


def ends_if_every_action_waits(plan, chosen):
    """Whether the first part ends if each node waits in each send and receive until the other end is there, too."""
    rows = {node: [a for a in row if a.microbatch in chosen] for node, row in plan.rows.items()}
    at = dict.fromkeys(rows, 0)

    def current(node):
        return rows[node][at[node]] if at[node] < len(rows[node]) else None

    moved = True
    while moved:
        moved = False
        for node in rows:
            action = current(node)
            if action is None or action.kind.is_receive:
                continue
            if action.kind.is_send:
                other = plan.channel_of(action, node).target
                if current(other) != action.counterpart:
                    continue
                at[other] += 1
            at[node] += 1
            moved = True
    return all(current(node) is None for node in rows)


def test_replicas_stay_in_lockstep():
    plan = ushape(Topology([1, 1, 1], dp=2, edge_dp=1), 8)
    verify(run_first(plan, [4, 5]), lockstep=[1, 2])


def test_sums_of_gradients_keep_their_order():
    """The first microbatch is the first one in each sum anyway."""
    plan = optimize(Topology([1, 1, 1]), 8, Costs(1.0, 2.0, latency=0.5), split_backward=True)
    for node, row in run_first(plan, [0]).rows.items():
        for kind in ("B", "I", "W"):
            for chunk in plan.topology.chunks_of(node.stage):
                orders = [
                    [a for a in r if (a.chunk, a.kind) == (chunk, kind)] for r in (row, plan.rows[node])
                ]
                assert orders[0] == orders[1]


def test_a_row():
    plan = ushape(Topology([1, 1]), 2)
    changed = run_first(plan, [0])
    rows = {node.stage: " ".join(map(str, row)) for node, row in changed.rows.items()}
    assert rows[0].startswith("0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0 ")
    assert rows[1].startswith("1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1RECV_F1 ")
