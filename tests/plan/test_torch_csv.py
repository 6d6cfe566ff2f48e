"""Plans as torch.distributed.pipelining's CSV: what is kept, what is recomputed, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldt.plan import (
    Kind,
    PlanError,
    add_communication,
    add_grad_reduction,
    from_csv,
    remove_communication,
    to_csv,
)
from ldt.plan import ushape as make_ushape
from ldt.plan.plan import Plan
from ldt.topology import Topology

TOPOLOGY = Topology([1, 1, 1])


@given(
    stages=st.integers(1, 6),
    laps=st.integers(1, 2),
    number=st.integers(1, 12),
    dp=st.integers(1, 2),
    training=st.booleans(),
    communication=st.booleans(),
    lanes=st.sampled_from(["dedicated", "paired"]),
)
def test_the_compute_order_comes_back(
    stages: int, laps: int, number: int, dp: int, training: bool, communication: bool, lanes: str
) -> None:
    topology = Topology([1] * stages, dp=dp, laps=laps)
    plan = make_ushape(topology, number, training=training)
    read = from_csv(to_csv(plan, communication=communication), topology, lanes=lanes)  # type: ignore[arg-type]
    assert (read.num_microbatches, read.training, read.lanes) == (number, training, lanes)
    assert compute_only(read) == compute_only(plan)


def compute_only(plan: Plan) -> dict[object, list[object]]:
    return {
        node: [a for a in row if a.kind.is_compute] for node, row in remove_communication(plan).rows.items()
    }


def test_torch_has_actions_of_its_own() -> None:
    text = to_csv(make_ushape(Topology([1]), 1)).strip()
    assert from_csv(f"0UNSHARD,{text},,1RESHARD,0REDUCE_GRAD\n\n,,\n", Topology([1])) == make_ushape(
        Topology([1]), 1
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: "\n" + text.replace("2F0", "2X0"), "line 4: "),
        (lambda text: text.replace("1F0,1F1", "(1F0;1X1)OVERLAP_F_B"), "line 2: "),
        (
            lambda text: text + text,
            "expected a line for each of the 3 stages of tp=1,1,1 dp=1 edge_dp=1 laps=1, got 6",
        ),
        (lambda text: text.replace("1B0,", ""), "1B0"),
        (lambda text: text.replace("1F0,", "").replace("2F0", "1F0,2F0"), "1F0"),
        (lambda text: "", "got 0"),
    ],
)
def test_what_is_no_plan(change: object, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_csv(change(to_csv(make_ushape(TOPOLOGY, 4))), TOPOLOGY)  # type: ignore[operator]
    assert problem in str(caught.value)


def test_split_backwards_are_kept() -> None:
    bare = remove_communication(make_ushape(TOPOLOGY, 2))
    rows = {
        node: [
            p
            for a in row
            for p in ([a._replace(kind=k) for k in (Kind.I, Kind.W)] if a.kind is Kind.B else [a])
        ]
        for node, row in bare.rows.items()
    }
    split = add_communication(add_grad_reduction(bare.with_rows(rows, None)), "dedicated")
    assert from_csv(to_csv(split), TOPOLOGY) == split


def test_a_shared_edge_is_refused() -> None:
    topology = Topology([1, 1, 1], dp=2, edge_dp=1)
    for exchange in (
        lambda: to_csv(make_ushape(topology, 4)),
        lambda: from_csv(to_csv(make_ushape(TOPOLOGY, 4)), topology),
    ):
        with pytest.raises(
            PlanError, match=r"expected edge_dp equal to dp, got edge_dp=1, dp=2; use Plan.to_text"
        ):
            exchange()
