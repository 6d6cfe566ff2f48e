"""Multi-token prediction in the last chunk, as in DeepSeek-V3: a second head that sees the next token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn
from torch.nn import functional

import ldt
from ldt.testing import RankPool, ToyChunk
from ldt.topology import Topology

WORLD_SIZE = 2
WORDS, WIDTH, MICROBATCHES, WEIGHT = 32, 16, 3, 0.5


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.block = embedding, ToyChunk(WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.block(self.embedding(ids)), ldt.keep(ids)


class Tail(nn.Module):
    """Predicts the next token, and by ``second`` the one behind it. Its embedding is that of the head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.block, self.second = embedding, ToyChunk(WIDTH), ToyChunk(WIDTH)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        hidden = self.block(hidden)
        ahead = self.second(hidden[:, :-1] + self.embedding(ids[:, 1:]))
        loss = mean_loss(ahead[:, :-1] @ self.embedding.weight.t(), ids[:, 2:])
        return ldt.add_loss(hidden @ self.embedding.weight.t(), loss, "second token", WEIGHT)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], ids[:, 1:])


def next_token_sum(logits: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    return next_token(logits, ids) * ids[:, 1:].numel(), ids[:, 1:].numel()


def model() -> list[Any]:
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    return [Head(embedding), ToyChunk(WIDTH), Tail(embedding)]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (2, 6 + 2 * m), generator=generator) for m in range(MICROBATCHES)]


def train(reduction: str) -> None:
    topology = Topology([1, 1])
    chunks = model()
    reference = copy.deepcopy(chunks)
    objective, second = torch.zeros(()), torch.zeros(())
    sizes = [ids[:, 1:].numel() if reduction == "token" else 1 for ids in batch()]
    for ids, size in zip(batch(), sizes, strict=True):
        hidden = reference[1](reference[0].block(reference[0].embedding(ids)))
        hidden = reference[2].block(hidden)
        ahead = reference[2].second(hidden[:, :-1] + reference[0].embedding(ids[:, 1:]))
        words = reference[0].embedding.weight.t()
        of_second = mean_loss(ahead[:, :-1] @ words, ids[:, 2:])
        objective = objective + size * (next_token(hidden @ words, ids) + WEIGHT * of_second) / sum(sizes)
        second = second + size * of_second.detach() / sum(sizes)
    objective.backward()
    with ldt.connect(topology) as mesh:
        loss_fn: Any = next_token_sum if reduction == "token" else next_token
        pipeline = build(mesh, chunks, loss_fn, loss_reduction=reduction)
        result = pipeline.step([(ids, ids) for ids in batch()] if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.auxiliary["second token"], second, check_dtype=False)
            assert result.loss is not None
            total = result.loss + WEIGHT * result.auxiliary["second token"]
            torch.testing.assert_close(total, objective.detach(), check_dtype=False)
        for index in topology.chunks_of(mesh.stage):
            for got, wanted in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("reduction", ["mean", "token"])
def test_gradients_are_those_of_the_unsplit_model(pool: RankPool, reduction: str) -> None:
    pool.run(train, reduction)
