"""Tensors that chunks keep and modify in place, such as running counters, and tensors that must be freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 3


class Counting(nn.Module):
    """Returns its buffer, a view of a plain attribute, or an entry of a list, which the next forward modifies."""

    def __init__(self, pick: Callable[[Counting], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(1))
        self.several = torch.zeros(3, 16)
        self.listed = [torch.zeros(1)]
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.hidden: Any = SimpleNamespace(tensor=torch.zeros(1))
        self.pick = pick

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        self.several.add_(1)
        self.listed[0].add_(1)
        self.frozen.add_(1)
        if type(x) is Tensor:  # not during shape inference, which does not look into objects
            self.hidden.tensor.add_(1)
        return self.linear(x * scale), self.pick(self)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale  # type: ignore[no-any-return]


def buffer(chunk: Counting) -> Tensor:
    return chunk.seen


def view(chunk: Counting) -> Tensor:
    return chunk.several[1]


def parameter(chunk: Counting) -> Tensor:
    return chunk.frozen


def entry(chunk: Counting) -> Tensor:
    return chunk.listed[0]


def hidden(chunk: Counting) -> Tensor:
    return chunk.hidden.tensor  # type: ignore[no-any-return]


PICKS = {
    "buffer": buffer,
    "view of an attribute": view,
    "entry of a list": entry,
    "parameter": parameter,
    "of an object": hidden,
}


def made(name: str, stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(Counting(PICKS[name]) for _ in range(stages)), Scaling()]


def counters(name: str, stages: int) -> None:
    batch = toy_microbatches(6)
    with ldt.connect(Topology([1] * stages), ranks=range(stages)) as mesh:
        chunks = made(name, stages)
        step_and_compare(mesh, build(mesh, chunks), chunks, batch)
        losses, _ = unsplit_step(made(name, stages), batch, toy_loss)
        result = build(mesh, made(name, stages)).eval(batch if mesh.is_edge else None)
        assert result.losses is None or all(map(torch.equal, result.losses, losses))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", sorted(PICKS))
def test_a_tensor_that_a_chunk_keeps(pool: RankPool, name: str, stages: int) -> None:
    pool.run(counters, name, stages, ranks=range(stages))


def losses_in_much_memory() -> list[int]:
    """``mse_loss`` keeps all elementwise losses in memory: count how many of these exist at once."""
    held: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(output, target)
        assert loss.untyped_storage().nbytes() > loss.nbytes, "this test needs another loss"
        held.append(weakref.ref(loss.untyped_storage()))
        counts.append(sum(storage() is not None for storage in held))
        return loss

    with ldt.connect(Topology([1, 1]), ranks=range(2)) as mesh:
        pipeline = build(mesh, toy_chunks(mesh.topology), loss_fn)
        result = pipeline.step(toy_microbatches(12) if mesh.is_edge else None)
        assert result.losses is None or len(result.losses) == len(held)
        counts.append(sum(storage() is not None for storage in held))
    return counts


def test_losses_take_no_more_memory_than_numbers(pool: RankPool) -> None:
    edge, cloud = pool.run(losses_in_much_memory, ranks=range(2))
    assert len(edge) == 12 + 1
    assert max(edge) <= 2, "the one that is computed, and one before it"
    assert edge[-1] == 0
    assert cloud == [0]
