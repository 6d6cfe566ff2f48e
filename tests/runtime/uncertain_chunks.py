"""Chunks that always, never or sometimes give a gradient to their inputs, in steps that equal the unsplit model's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.plan import Action, Kind, ushape
from ldt.plan.schedules.passes import add_communication, remove_communication
from ldt.runtime import TensorSpec
from ldt.runtime.comm.transfer_modes import Transfer
from ldt.testing import ToyChunk, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

Chunks = Sequence[nn.Module]


class Two(nn.Module):
    """Returns two products of its input, the second with a separate parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.u = (nn.Parameter(torch.full((16,), scale)) for scale in (2.0, 3.0))

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.a, x * self.u


class First(ToyChunk):
    """Uses only the first tensor."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return super().forward(x)


class Passing(First):
    """Returns the second tensor as well, so that the next chunk decides."""

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), u * 2


class Both(First):
    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + u


class Returning(First):
    """A last chunk that returns both tensors; a loss takes one of them."""

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), u.tanh()


class Sometimes(First):
    """Uses the second tensor if a random draw says so."""

    draws = (random.random, numpy.random.rand)

    def forward(self, x: Tensor, u: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + (u if sum(draw() for draw in self.draws) > 1 else 0)


class Either(First):
    """Uses its only input if a random draw says so."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x if random.random() > 0.5 else torch.ones(4, 16))


class Alternating(First):
    """Cuts the graph in every other forward, starting with the first or the second."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.calls = start

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.detach() if self.calls % 2 else x)


class Alternately(Alternating):
    def __init__(self) -> None:
        super().__init__(start=1)


class EndsCut(nn.Module):
    """Cuts the graph after all of its layers in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = ToyChunk(16), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.body(x).detach() if self.calls % 2 else self.body(x)


class Never(First):
    def forward(self, *tensors: Tensor) -> Tensor:
        return super().forward(torch.ones(4, 16))


class Declared(Sometimes):
    def output_spec(self, x: TensorSpec, u: TensorSpec) -> TensorSpec:
        return TensorSpec(x.shape, x.dtype, requires_grad=True)


class Stopping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Dropping(nn.Module):
    """Layer dropout: a random draw, or its state, decides whether its only trained layer runs."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.draw, self.calls = draw, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        draws = {
            "python": random.random,
            "numpy": numpy.random.rand,
            "not in the first call": lambda: self.calls > 1,
            "in every other call": lambda: self.calls % 2,
        }
        return self.linear(x) if draws[self.draw]() > 0.5 else x * 1.0


def frozen() -> nn.Module:
    return nn.Linear(16, 16).requires_grad_(False)


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)


def first(output: Any, target: Tensor) -> Tensor:
    """Return the loss of the first output."""
    return toy_loss(output[0] if isinstance(output, tuple) else output, target)


def compare(mesh: ldt.Mesh, pipeline: ldt.Pipeline, chunks: Chunks, number: int) -> dict[str, int]:
    """Compare a step with the unsplit model; None differs from zeros. Returns the gradient bytes, by channel."""
    batch = toy_microbatches(4)
    for chunk in chunks:
        chunk.zero_grad()
    seed(number)
    losses, reference = unsplit_step(chunks, batch, first)
    seed(number)
    result = pipeline.step(batch if mesh.is_edge else None)
    assert result.losses is None or all(map(torch.equal, result.losses, losses))
    for index in mesh.topology.chunks_of(mesh.stage):
        pairs = zip(chunks[index].named_parameters(), reference[index].parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), (index, name, mine.grad, theirs.grad)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), (index, name)  # type: ignore[arg-type]
    for chunk, twin in zip(chunks, reference, strict=True):
        if isinstance(chunk, (Dropping, Alternating)):
            chunk.calls = twin.calls  # type: ignore[assignment]
    return {name: traffic.bytes for name, traffic in result.stats.channels.items() if name[0] == "B"}


def split(plan: ldt.plan.Plan) -> ldt.plan.Plan:
    """Return the plan with every B as an I and a W."""
    bare = remove_communication(plan)
    rows = {}
    for node, row in bare.rows.items():
        parts: list[Action] = []
        for action in row:
            kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
            parts += [action._replace(kind=kind) for kind in kinds]
        rows[node] = tuple(parts)
    return add_communication(bare.with_rows(rows, None), plan.lanes or "dedicated")


def made(kinds: Sequence[Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Dropping(kind) if isinstance(kind, str) else kind() for kind in kinds]


def steps(cases: dict[str, Sequence[Any]], topology: Topology, halves: bool = False) -> dict[str, list[int]]:
    """Run three steps of each case's chunks. Returns the bytes of the gradients that the first chunk received."""
    found = {}
    transfer: Transfer = "leader" if topology.tp[-1] == 1 else "direct"
    with ldt.connect(topology, ranks=range(topology.world_size), transfer=transfer) as mesh:
        for name, kinds in cases.items():
            chunks = made(kinds)
            plan = split(ushape(topology, 4)) if halves else None
            pipeline = build(mesh, chunks, first, plan=plan)
            try:
                counts = [compare(mesh, pipeline, chunks, number) for number in range(3)]
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
            found[name] = [
                sum(nbytes for hop, nbytes in step.items() if hop.startswith("B0")) for step in counts
            ]
    return found


ONE = 4 * 4 * 16 * 4  # bytes of four microbatches of float32[4, 16]
