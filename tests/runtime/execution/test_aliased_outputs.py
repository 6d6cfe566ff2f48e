"""Outputs that share memory with each other or with kept tensors, before a chunk that works in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.errors import LdtError
from ldt.testing import RankPool, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


class Returning(nn.Module):
    def __init__(self, returned: Callable[[Returning, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.returned = returned
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.returned(self, self.linear(x))


class Passing(nn.Module):
    """Returns its inputs, or views of them."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view(-1, 16) for tensor in tensors) if self.view else tensors


class Using(nn.Module):
    """Sums its inputs, after modifying a part of the input at index ``place``, if given, in place."""

    def __init__(self, place: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.place = place

    def forward(self, *tensors: Tensor) -> Tensor:
        if self.place is not None:
            tensors[self.place].narrow(-1, 0, 1).mul_(2)
        total: Tensor = self.linear(sum(tensor.reshape(-1, 16) for tensor in tensors))
        return total


def twice(chunk: Returning, y: Tensor) -> Any:
    return y, y


def view(chunk: Returning, y: Tensor) -> Any:
    return y, y.view(-1)


def rows(chunk: Returning, y: Tensor) -> Any:
    return y[:3], y[1:]


def kept(chunk: Returning, y: Tensor) -> Any:
    chunk.kept = y.detach()
    return y, y + 1


def expanded(chunk: Returning, y: Tensor) -> Any:
    return y[:, :1].expand(-1, 16)


def copied(chunk: Returning, y: Tensor) -> Any:
    return y, y.clone()


def job(
    returned: Callable[[Returning, Tensor], Any], place: int | None, stages: int, way: str, refused: bool
) -> None:
    topology = Topology([1] * stages)
    torch.manual_seed(0)
    chunks: list[nn.Module] = [
        Returning(returned),
        *(Passing(way == "view") for _ in range(stages - 1)),
        Using(place),
    ]
    batch = toy_microbatches(4)
    with ldt.connect(topology, ranks=range(stages)) as mesh:
        pipeline = build(mesh, chunks, toy_loss, free_outputs=way != "kept outputs")
        if not refused:
            step_and_compare(mesh, pipeline, chunks, batch)
            step_and_compare(mesh, pipeline, chunks, batch)
            return
        # Aliased tensors pass through the middle chunks; the edge has the first and the last chunk.
        call = pipeline.eval if way == "eval" else pipeline.step
        with pytest.raises(LdtError) as caught:
            call(batch if mesh.is_edge else None)
        assert f"changes input {place} in place" in str(caught.value)
        assert f"chunk {topology.tail}" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "stages", "way"),
    [
        (twice, 1, "itself"),
        (twice, 2, "itself"),
        (twice, 3, "itself"),
        (twice, 3, "view"),
        (twice, 2, "eval"),
        (twice, 2, "kept outputs"),
        (view, 2, "itself"),
        (rows, 3, "itself"),
        (kept, 1, "itself"),
        (kept, 3, "view"),
        (expanded, 1, "itself"),
        (expanded, 2, "itself"),
        (expanded, 3, "eval"),
    ],
)
def test_one_of_two_in_one_memory_is_changed_in_place(
    pool: RankPool, returned: Callable[..., Any], stages: int, way: str
) -> None:
    pool.run(job, returned, 0, stages, way, True, ranks=range(stages))


def alone(stages: int) -> None:
    for returned, place in (
        (twice, None),
        (view, None),
        (kept, None),
        (kept, 1),
        (expanded, None),
        (copied, 0),
        (copied, 1),
    ):
        for way in ("itself", "kept outputs"):
            job(returned, place, stages, way, False)


@pytest.mark.parametrize("stages", [1, 3])
def test_neither_alone_is_an_error(pool: RankPool, stages: int) -> None:
    pool.run(alone, stages, ranks=range(stages))


# -- without a graph, tensors that it would have saved may be modified ---------------------------------------------


class Saved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class InPlaceInEval(Using):
    def forward(self, *tensors: Tensor) -> Tensor:
        self.place = None if torch.is_grad_enabled() else 0
        return super().forward(*tensors)


def in_place_in_eval() -> None:
    torch.manual_seed(0)
    chunks = [nn.Sequential(nn.Linear(16, 16), Saved()), nn.Identity(), InPlaceInEval(None)]
    batch = toy_microbatches(3)
    with ldt.connect(Topology([1, 1]), ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, batch)
        result = pipeline.eval(batch if mesh.is_edge else None)
        if mesh.is_edge:
            assert result.outputs is not None
            with torch.no_grad():
                expected = [nn.Sequential(*chunks)(x) for x, _ in batch]
            assert all(map(torch.equal, result.outputs, expected))


def test_work_in_place_without_a_graph(pool: RankPool) -> None:
    pool.run(in_place_in_eval, ranks=range(2))
