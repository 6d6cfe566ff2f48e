"""step and eval in any order, under any grad mode; frozen parts; both loss reductions; memory use."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from pipeline_jobs import assert_equal_grads, build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])


def eval_and_compare(
    mesh: ldt.Mesh, pipeline: ldt.Pipeline, chunks: list[nn.Module], batch: list[tuple[Tensor, Tensor]]
) -> None:
    result = pipeline.eval(batch if mesh.is_edge else None)
    assert not any(name.startswith("B") for name in result.stats.channels), "eval moves no gradients"
    if not mesh.is_edge:
        assert (result.loss, result.losses, result.outputs) == (None, None, None)
        return
    with torch.no_grad():
        expected = [nn.Sequential(*chunks)(inputs) for inputs, _ in batch]
    assert result.outputs is not None
    assert result.losses is not None
    assert [torch.equal(a, b) for a, b in zip(result.outputs, expected, strict=True)] == [True] * len(batch)
    for loss, output, (_, target) in zip(result.losses, expected, batch, strict=True):
        assert torch.equal(loss, toy_loss(output, target))
    assert not any(output.requires_grad for output in result.outputs)


def any_order(context: str) -> None:
    """Run eval(M=2, batch 1), step(M=4, batch 2), eval(M=1, batch 3), step."""
    mode: Any = {"none": contextlib.nullcontext, "no_grad": torch.no_grad}.get(context)
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        for number, batch, training in [
            (2, 1, False),
            (4, 2, True),
            (1, 3, False),
            (4, 2, True),
            (2, 1, False),
        ]:
            microbatches = toy_microbatches(number, batch=batch)
            if training:
                for chunk in chunks:
                    chunk.zero_grad()
                losses, reference = unsplit_step(chunks, microbatches, toy_loss)
                with (mode or contextlib.nullcontext)():
                    result = pipeline.step(microbatches if mesh.is_edge else None)
                assert_equal_grads(mesh, chunks, reference)
                assert result.losses is None or all(map(torch.equal, result.losses, losses))
            else:
                with mode() if mode else torch.inference_mode():
                    eval_and_compare(mesh, pipeline, chunks, microbatches)


@pytest.mark.parametrize("context", ["none", "no_grad", "inference_mode"])
def test_step_and_eval_in_any_order(pool: RankPool, context: str) -> None:
    pool.run(any_order, context)


class Talkative(ToyChunk):
    """Returns another shape and a second tensor in training mode, as models with auxiliary outputs do."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:  # type: ignore[override]
        output = super().forward(x if extra is None else x + extra.sum())
        return (output, output.mean(0)) if self.training else output


def switched_modes(on: list[int]) -> str:
    """Call eval(), then train(False) on the ranks ``on``, then eval() again."""
    torch.manual_seed(0)
    chunks: list[nn.Module] = [Talkative(16), Talkative(16), Talkative(16), ToyChunk(16)]
    batch = toy_microbatches(2)
    with ldt.connect(TOPOLOGY) as mesh:
        chunks[-1].forward = lambda x, extra=None: ToyChunk.forward(chunks[-1], x)  # type: ignore[method-assign, assignment]
        pipeline = build(mesh, chunks)
        pipeline.eval(batch if mesh.is_edge else None)
        if mesh.rank in on:
            for chunk in chunks:
                chunk.eval()
        try:
            eval_and_compare(mesh, pipeline, chunks, batch)
        except ldt.LdtError as error:
            return str(error)
    return ""


def test_train_and_eval_mode_between_calls(pool: RankPool) -> None:
    """It changes what hops carry, and needs no announcement if all ranks do it."""
    assert pool.run(switched_modes, [0, 1, 2]) == [""] * 3
    for text in pool.run(switched_modes, [1]):
        assert "autocast and train/eval mode must be the same on all ranks" in text


class Tying(ToyChunk):
    """Sends its weight to the tail."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.first.weight


class Tied(ToyChunk):
    def forward(self, x: Tensor, weight: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) @ weight


class Passing(ToyChunk):
    def forward(self, x: Tensor, weight: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), weight


def weight_on_a_hop() -> None:
    torch.manual_seed(0)
    chunks: list[nn.Module] = [Tying(16), Passing(16), Passing(16), Tied(16)]
    batch = toy_microbatches(3)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, batch)
            losses, _ = unsplit_step(chunks, batch, toy_loss)
            result = pipeline.eval(batch if mesh.is_edge else None)
            assert result.losses is None or all(map(torch.equal, result.losses, losses))


def test_a_chunk_may_pass_its_weight_on(pool: RankPool) -> None:
    pool.run(weight_on_a_hop)


def eval_without_targets() -> None:
    chunks = toy_chunks(TOPOLOGY)
    batch = toy_microbatches(3)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks, loss_fn=None)
        result = pipeline.eval([(inputs, None) for inputs, _ in batch] if mesh.is_edge else None)
        assert result.loss is None
        assert (result.outputs is not None and len(result.outputs) == 3) == mesh.is_edge


def test_eval_needs_no_targets(pool: RankPool) -> None:
    pool.run(eval_without_targets)


# -- frozen parts ------------------------------------------------------------------------------------------------

FROZEN = {"head": [0], "middle": [1], "all but the tail": [0, 1, 2], "two of three": [0, 1], "tail": [3]}


def frozen(which: list[int], laps: int) -> dict[str, int]:
    topology = Topology([1, 1, 1], laps=laps)
    chunks = toy_chunks(topology)
    for index in range(topology.tail) if which == [0, 1, 2] else which:
        chunks[index].requires_grad_(False)
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        for _ in range(2):
            result = step_and_compare(mesh, pipeline, chunks, toy_microbatches(4))
        return {name: traffic.messages for name, traffic in result.stats.channels.items()}


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("name", sorted(FROZEN))
def test_frozen_parts(pool: RankPool, name: str, laps: int) -> None:
    traffic = pool.run(frozen, FROZEN[name], laps)
    gradients = {channel for row in traffic for channel in row if channel.startswith("B")}
    if name == "all but the tail":
        assert not gradients
    if name == "head":
        assert "B0:1.0->0.0" not in gradients
        assert "B1:2.0->1.0" in gradients
    if name == "middle":
        assert "B0:1.0->0.0" in gradients


def gradients_on_odd_microbatches() -> int:
    """Freeze everything except the inputs, of which only every other one requires a gradient."""
    chunks = toy_chunks(TOPOLOGY)
    for chunk in chunks:
        chunk.requires_grad_(False)
    chunks[3].requires_grad_(True)
    batch = [(x.clone().requires_grad_(n % 2 == 1), y) for n, (x, y) in enumerate(toy_microbatches(4))]
    twin = [(x.detach().clone().requires_grad_(x.requires_grad), y) for x, y in batch]
    _, reference = unsplit_step(chunks, twin, toy_loss)
    with ldt.connect(TOPOLOGY) as mesh:
        result = build(mesh, chunks).step(batch if mesh.is_edge else None)
        assert_equal_grads(mesh, chunks, reference)
        if mesh.is_edge:
            for (mine, _), (theirs, _) in zip(batch, twin, strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
        return sum(traffic.messages for name, traffic in result.stats.channels.items() if name[0] == "B")


def test_gradients_on_odd_microbatches_only(pool: RankPool) -> None:
    assert pool.run(gradients_on_odd_microbatches) == [4, 4, 4], "two microbatches, two channels at each rank"


def unfrozen_later(forget: bool) -> str:
    chunks = toy_chunks(TOPOLOGY)
    chunks[0].requires_grad_(False)
    chunks[1].requires_grad_(False)
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
        chunks[1].requires_grad_(True)
        if forget:
            pipeline.forget_shapes()
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
            chunks[1].requires_grad_(False)  # unannounced: the gradients arrive and are dropped
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(2))
            return ""
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


def test_unfreezing_between_steps(pool: RankPool) -> None:
    assert pool.run(unfrozen_later, True) == [""] * 3
    assert all("pipeline.forget_shapes() on every rank" in text for text in pool.run(unfrozen_later, False))


# -- loss reductions ---------------------------------------------------------------------------------------------


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over rows whose target is positive, and their number."""
    kept = target[:, 0] > 0
    return ((output - target) ** 2)[kept].sum(), kept.sum()


def per_token(dp: int, stages: int) -> list[float]:
    topology = Topology([1] * stages, dp=dp)
    chunks = toy_chunks(topology)
    batches = [toy_microbatches(3, seed=seed) for seed in range(dp)]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks, token_loss, loss_reduction="token")
        pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        before = [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        for parameter, first in zip(pipeline.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, first + first), "the second step adds to what is there"
        model = nn.Sequential(*chunks)
        model.zero_grad()
        count, losses = 0.0, []
        for inputs, target in (pair for batch in batches for pair in batch):
            loss, tokens = token_loss(model(inputs), target)
            loss.backward()
            count += float(tokens)
            losses.append(loss.detach())
        for parameter, first in zip(pipeline.parameters(), before, strict=True):
            assert parameter.grad is not None
            if dp == 1:
                assert torch.equal(first, parameter.grad / count)
            torch.testing.assert_close(first, parameter.grad / count)
        if mesh.is_edge:  # the reported loss is that of a replica's own tokens
            own = losses[3 * mesh.replica :][:3]
            tokens = sum(token_loss(target, target)[1] for _, target in batches[mesh.replica])
            assert result.loss is not None
            assert torch.equal(result.loss, sum(own[1:], own[0]) / float(tokens))
        return [] if result.losses is None else [loss.item() for loss in result.losses]


@pytest.mark.parametrize(("dp", "stages"), [(1, 1), (1, 3)])
def test_loss_per_token(pool: RankPool, dp: int, stages: int) -> None:
    losses = pool.run(per_token, dp, stages, ranks=range(stages))
    assert len(losses[0]) == 3
    assert all(row == [] for row in losses[1:])


def test_loss_per_token_over_replicas(pool: RankPool) -> None:
    pool.run(per_token, 2, 1, ranks=[0, 1])


# -- memory ------------------------------------------------------------------------------------------------------


class Watched(ToyChunk):
    """Keeps weak references to the storages of its outputs."""

    def __init__(self) -> None:
        super().__init__(16)
        self.returned: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if type(output) is Tensor:  # not during shape inference
            self.returned.append(weakref.ref(output.untyped_storage()))
        return output

    def alive(self) -> int:
        return sum(storage() is not None for storage in self.returned)


class Watching(ToyChunk):
    """The tail: records at each forward whether the head's output of that microbatch is still in memory."""

    def __init__(self, head: Watched) -> None:
        super().__init__(16)
        self.heads = [head]  # in a list, so that it is not a submodule
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.seen.append(self.heads[0].returned[len(self.seen)]() is not None)
        return super().forward(x)


def outputs_kept(free_outputs: bool) -> tuple[list[bool], int]:
    torch.manual_seed(0)
    topology = Topology([1, 1, 1])
    chunks: list[Any] = [Watched() for _ in range(3)]
    chunks.append(Watching(chunks[0]))
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks, free_outputs=free_outputs)
        pipeline.step(toy_microbatches(8) if mesh.is_edge else None)
        return chunks[3].seen, chunks[mesh.stage].alive()


def test_outputs_are_freed_once_sent(pool: RankPool) -> None:
    """When the tail runs, the head's output has long been sent; only free_outputs releases it before B0."""
    freed, kept = pool.run(outputs_kept, True), pool.run(outputs_kept, False)
    assert freed[0][0] == [False] * 8
    assert kept[0][0] == [True] * 8
    assert [alive for _, alive in freed + kept] == [0] * 6, "nothing outlives the step"
