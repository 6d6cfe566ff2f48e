"""Transfer modes give bit-equal results, and each stripe carries its share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.runtime.comm.transfer_modes import TransferChoice, Transfers
from ldt.runtime.mesh import autotune
from ldt.runtime.mesh.autotune import Line, crossover
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 5


def sent(stats: Any) -> dict[str, float]:
    """Return the bytes by lane name, without the mesh's prefix."""
    return {name: lane["sent_bytes"] for name, lane in stats.lanes.items() if lane["sent_bytes"]}


def steps(
    tp: list[int], laps: int, policy: LanePolicy, transfer: TransferChoice, batch: int
) -> dict[str, float]:
    topology = Topology(tp, laps=laps)
    chunks = toy_chunks(topology, width=256)
    microbatches = toy_microbatches(3, width=256, batch=batch)
    with ldt.connect(topology, lanes=policy, transfer=transfer, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks)
        for _ in range(2):
            result = step_and_compare(mesh, pipeline, chunks, microbatches)
        pipeline.eval(microbatches[:1] if mesh.is_edge else None)
        return sent(result.stats)


@pytest.mark.parametrize(("laps", "policy"), [(1, "dedicated"), (2, "paired")])
@pytest.mark.parametrize("tp", [[2, 2], [2, 3], [3, 2], [1, 2], [2, 1, 2]], ids=str)
def test_shares_add_up(pool: RankPool, tp: list[int], laps: int, policy: LanePolicy) -> None:
    """Seven rows do not divide evenly by two."""
    by_rank = pool.run(steps, tp, laps, policy, "scatter", 7, ranks=range(sum(tp)))
    first = min(tp)
    totals = [sum(lanes.values()) for lanes in by_rank]
    assert len(set(totals[:first])) == 1, "ranks of the edge that send carry equal shares"
    assert len(tp) > 2 or totals[first : tp[0]] == [0] * (tp[0] - first)
    if tp == [2, 2] and laps == 1:
        total = 3 * 7 * 256 * 4
        assert [sum(lanes.values()) for lanes in by_rank] == [total] * 4, (
            "half of what goes out and of what comes back"
        )


@pytest.mark.parametrize(("laps", "policy"), [(1, "dedicated"), (2, "paired")])
@pytest.mark.parametrize("tp", [[2, 2], [1, 2, 2], [2, 2, 1]], ids=str)
def test_each_rank_to_its_peer(pool: RankPool, tp: list[int], laps: int, policy: LanePolicy) -> None:
    by_rank = pool.run(steps, tp, laps, policy, "direct", 8, ranks=range(sum(tp)))
    if tp == [2, 2] and laps == 1:
        assert [sum(lanes.values()) for lanes in by_rank] == [2 * 3 * 8 * 256 * 4] * 4


class Rows(nn.Module):
    """Computes on this rank's share of the rows, as sequence-parallel layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ToyChunk(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def split_rows() -> None:
    """Each rank runs the model on its half of every microbatch and gets the gradients of that half."""
    topology = Topology([2, 2])
    chunks = [Rows() for _ in range(3)]
    for number, chunk in enumerate(chunks):
        torch.manual_seed(number)
        for parameter in chunk.parameters():
            nn.init.normal_(parameter)
    with ldt.connect(topology, transfer="direct", ranks=range(4)) as mesh:
        halves = [tuple(t.chunk(2)[mesh.tp_rank] for t in pair) for pair in toy_microbatches(3)]
        step_and_compare(mesh, build(mesh, chunks), chunks, halves)  # type: ignore[arg-type]


def test_ranks_may_have_rows_of_their_own(pool: RankPool) -> None:
    pool.run(split_rows, ranks=range(4))


def steps_cut_from(nbytes: float, batch: int) -> tuple[dict[str, float], list[float]]:
    """Run ``steps`` with "auto", on links that split messages of ``nbytes`` or more."""
    autotune.crossover = lambda leader, scatter: nbytes  # type: ignore[assignment]
    try:
        return steps([2, 2], 1, "dedicated", "auto", batch)
    finally:
        autotune.crossover = crossover


@pytest.mark.parametrize(
    ("nbytes", "cut"), [(8 * 256 * 4, True), (8 * 256 * 4 + 1, False), (math.inf, False)]
)
def test_short_messages_use_one_stripe(pool: RankPool, nbytes: float, cut: bool) -> None:
    """Messages below the measured size are not split. Each direction has three messages of 8 rows."""
    by_rank = pool.run(steps_cut_from, nbytes, 8, ranks=range(4))
    total = 2 * 3 * 8 * 256 * 4
    expected = [total / 2] * 4 if cut else [total, 0, total, 0]
    assert [sum(lanes.values()) for lanes in by_rank] == expected


def test_as_measured(pool: RankPool) -> None:
    """Results do not depend on what "auto" measured, also with stages of unequal sizes."""
    pool.run(steps, [2, 3], 2, "paired", "auto", 1024)


@pytest.mark.parametrize(
    ("leader", "scatter", "expected"),
    [
        (Line(0.0, 2e-9), Line(0.001, 1e-9), 1e6),  # one millisecond more, one nanosecond per byte less
        (Line(0.001, 2e-9), Line(0.0, 1e-9), 0.0),
        (Line(0.001, 2e-9), Line(0.001, 1.9e-9), math.inf),  # within noise
        (Line(0.001, 1e-9), Line(0.0, 2e-9), math.inf),
        (Line(0.001, 0.0), Line(0.0, 0.0), math.inf),
    ],
)
def test_the_size_from_which_cutting_pays(leader: Line, scatter: Line, expected: float) -> None:
    assert crossover(leader, scatter) == pytest.approx(expected)


def test_a_line_fits_the_measurements() -> None:
    small, large = autotune.SIZES
    assert Line.through(0.01 + small * 1e-9, 0.01 + large * 1e-9) == pytest.approx(Line(0.01, 1e-9))
    assert Line.through(0.02, 0.01).per_byte == 0.0


class Several(nn.Module):
    """Tensors of one, zero and three elements, a scalar, and another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ToyChunk(16)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        counts = torch.arange(3)
        return y.t().contiguous().t(), y[:1, :1], y[:0], counts, y.sum(), y[:, ::2]


class Last(Several):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        one, nothing, counts, scalar, half = others
        return self.body(x) * scalar + one + half.sum() + nothing.sum() + counts.sum()  # type: ignore[no-any-return]


def odd_tensors(transfer: TransferChoice) -> None:
    torch.manual_seed(0)
    topology = Topology([2, 3])
    chunks = [Several(), Several(), Last()]
    with ldt.connect(topology, transfer=transfer) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(3))


@pytest.mark.parametrize("transfer", ["leader", "scatter"])
def test_tensors_of_any_size_and_layout(pool: RankPool, transfer: TransferChoice) -> None:
    pool.run(odd_tensors, transfer)


def test_an_unknown_transfer_mode() -> None:
    with pytest.raises(
        ValueError,
        match=r"transfer must be 'leader', 'scatter', 'direct' or 'auto', or a dict .* got 'pigeon'",
    ):
        ldt.connect(Topology([1]), transfer="pigeon")  # type: ignore[arg-type]


@pytest.mark.parametrize("link", [(1, 1), (1, 3), (3, 4), 2, "01"], ids=str)
def test_a_link_that_does_not_exist(link: Any) -> None:
    with pytest.raises(ValueError, match=r"between stages \(0, 1\), \(0, 3\), \(1, 2\), \(2, 3\)"):
        Transfers.of(Topology([1, 2, 2, 1]), {link: "direct"})
