"""loss_reduction="root", scale_root, reduce_gradients=False and an observer: for trainers that scale and reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.plan import Costs, optimize
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
NUMBER = 3


def root(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What a trainer scales by itself: the root, and a count that is no divisor."""
    return toy_loss(output, target) / NUMBER, torch.tensor(len(output))


def rooted(topology: Topology, reduces: bool) -> None:
    chunks = toy_chunks(topology)
    batches = [toy_microbatches(NUMBER, seed=seed) for seed in range(topology.edge_dp)]
    found = [unsplit_step(chunks, batch, toy_loss) for batch in batches]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, loss_fn=root, loss_reduction="root", reduce_gradients=reduces)
        result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        assert result.count == 4.0 * NUMBER * topology.edge_dp
        if mesh.is_edge:
            losses = [loss / NUMBER for loss in found[mesh.replica][0]]
            assert torch.equal(torch.stack(result.losses or []), torch.stack(losses))
            torch.testing.assert_close(result.loss, torch.stack(losses).sum())
        for index in topology.chunks_of(mesh.stage):
            references = [reference[index].parameters() for _, reference in found]
            for got, *wanted in zip(chunks[index].parameters(), *references, strict=True):
                if topology.dp == 1 or not reduces:
                    assert torch.equal(got.grad, wanted[mesh.replica].grad)
                else:
                    torch.testing.assert_close(got.grad, sum(one.grad for one in wanted))


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("dp", [1, 2])
def test_backwards_start_at_the_roots(pool: RankPool, dp: int, reduces: bool) -> None:
    """Gradients are those of the sum of all roots; without reduction each replica keeps its own."""
    topology = Topology([1, 1], dp=dp)
    pool.run(rooted, topology, reduces, ranks=range(topology.world_size))


def scaled(reduction: str) -> None:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    batch = toy_microbatches(NUMBER)
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        loss = toy_loss if reduction == "mean" else root
        pipeline = build(
            mesh, chunks, loss_fn=loss, loss_reduction=reduction, scale_root=lambda loss: loss * 8
        )
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.loss, torch.stack(losses).mean())
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                assert torch.equal(got.grad, 8 * wanted.grad)  # type: ignore[operator]


@pytest.mark.parametrize("reduction", ["mean", "root"])
def test_roots_are_scaled_and_losses_are_not(pool: RankPool, reduction: str) -> None:
    pool.run(scaled, reduction, ranks=range(2))


class Seen(ldt.Observer):
    def __init__(self, parameter: nn.Parameter) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.parameter = parameter

    def before_forward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(("F", chunk, microbatch))

    def after_forward(self, chunk: int, microbatch: int) -> None:
        self.calls.append(("F ended", chunk, microbatch))

    def before_backward(self, chunk: int, microbatch: int, last: bool) -> None:
        self.calls.append(("B", chunk, microbatch, last, self.parameter.grad is None))

    def after_backward(self, chunk: int, microbatch: int, last: bool) -> None:
        self.calls.append(("B ended", chunk, microbatch, last, self.parameter.grad is None))


def observed(split: bool) -> list[tuple[Any, ...]]:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    plan = optimize(topology, 2, Costs(1.0, 2.0, weight=1.0 if split else None), split_backward=split)
    assert any(str(action).startswith("1W") for row in plan.rows.values() for action in row) == split
    with ldt.connect(topology, ranks=range(2)) as mesh:
        mine = topology.chunks_of(mesh.stage)[0]
        seen = Seen(next(chunks[mine].parameters()))
        pipeline = build(mesh, chunks, plan=plan, observer=seen)
        batch = toy_microbatches(2) if mesh.is_edge else None
        pipeline.step(batch)
        done = list(seen.calls)
        seen.calls.clear()
        pipeline.eval(batch)
        assert {call[0] for call in seen.calls} == {"F", "F ended"}
        return [call for call in done if call[1] == mine]


@pytest.mark.parametrize("split", [False, True])
def test_an_observer_sees_forwards_and_backwards(pool: RankPool, split: bool) -> None:
    for chunk, calls in enumerate(pool.run(observed, split, ranks=range(2))):
        assert [call for call in calls if call[0].startswith("F")] == [
            (name, chunk, microbatch) for microbatch in range(2) for name in ("F", "F ended")
        ]
        assert [call for call in calls if call[0].startswith("B")] == [
            ("B", chunk, 0, False, True),
            ("B ended", chunk, 0, False, False),
            ("B", chunk, 1, True, False),
            ("B ended", chunk, 1, True, False),
        ]


class Failing(ldt.Observer):
    def before_backward(self, chunk: int, microbatch: int, last: bool) -> None:
        raise RuntimeError("no more memory for the optimizer")


def failing() -> None:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(topology), observer=None if mesh.is_edge else Failing())
        with pytest.raises(RuntimeError, match="no more memory for the optimizer"):
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)


def test_an_error_of_an_observer_is_that_of_the_step(pool: RankPool) -> None:
    pool.run(failing, ranks=range(2))


def refused() -> None:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        for options, text in (
            ({"observer": object()}, "observer must be an ldt.Observer, got object"),
            ({"scale_root": 8.0}, "scale_root must be a function, got float"),
            ({"scale_root": abs, "grad_scaler": ldt.GradScaler(mesh)}, "give one of them"),
            ({"reduce_gradients": mesh.is_edge}, "must be given equal values of reduce_gradients"),
        ):
            with pytest.raises((ldt.LdtError, TypeError, ValueError), match=text):
                build(mesh, toy_chunks(topology), **options)


def test_what_cannot_be_right_is_refused(pool: RankPool) -> None:
    pool.run(refused, ranks=range(2))
