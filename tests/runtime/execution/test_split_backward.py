"""Backwards in two parts: gradients equal those of a whole backward, bit for bit, whatever the graph looks like."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ldt
from ldt.errors import LdtError
from ldt.plan import Action, Kind, Plan, ushape
from ldt.plan.schedules.passes import add_communication, remove_communication
from ldt.runtime.common.tensor_spec import specs_of
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.grad_hooks import check_hooks_and_layers
from ldt.runtime.execution.side_effects import FunctionWatch
from ldt.runtime.execution.step_state import StepState
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Uses one weight in three places, one of them through a tensor computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.weight * 2
        return torch.tanh(torch.tanh(torch.tanh(x @ self.weight) @ doubled) @ self.weight + doubled.sum(0))


class InPlace(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)  # type: ignore[no-any-return]


class Hooked(nn.Sequential):
    """Has tensor and module hooks that modify gradients, and would do so twice."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
            x.register_hook(lambda grad: grad * 3)
        return x


class Beside(nn.Module):
    """Has a second output that does not depend on the input, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = self.other(torch.ones(2, 16))
        return self.linear(x) * own.mean(), own


class Ignoring(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.ones(2, 16))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * 3 * x**2 * weight, (grad * x**3).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Cube.apply(self.linear(x), self.weight))  # type: ignore[no-any-return,no-untyped-call]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False, block: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.reentrant = block or Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16),
    "identity": nn.Identity,
    "block": lambda: nn.Sequential(Block(), Block()),
    "tied": Tied,
    "the same layer twice": lambda: nn.Sequential(*[nn.Linear(16, 16)] * 2),
    "in place": lambda: InPlace(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)),
    "hooks": lambda: Hooked(nn.Linear(16, 16), nn.Linear(16, 16)),
    "beside": Beside,
    "input not used": lambda: Ignoring(16, 16),
    "own function": Custom,
    "checkpoint": Checkpointed,
    "tied under checkpoint": lambda: Checkpointed(block=nn.Sequential(Tied(), nn.Linear(16, 16), Tied())),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 16)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(16, 16)),
    "frozen": frozen,
    "batch norm": lambda: nn.BatchNorm1d(8),
    "gru": lambda: nn.GRU(16, 16, num_layers=2, batch_first=True),
}

WORK = StepState(ushape(Topology([1, 1]), 1), [], [{}] * 8)


def run(runner: ChunkRunner, split: bool, free_outputs: bool, leaves: bool = True) -> list[Tensor]:
    """Run two microbatches in flight; returns the gradients of their inputs, None for an unused one."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, 8, 16, requires_grad=True) for _ in range(2)]
    grads, found = [], list[Tensor | None]()
    for index, x in enumerate(inputs):
        specs = specs_of([x])
        outputs = runner.detach_outputs(index, runner.forward(WORK, index, [x.detach()], specs))
        grads.append([torch.randn_like(output) for output in outputs])
    for index, grad in enumerate(grads):
        if split:
            before = [p.grad.clone() for p in runner.module.parameters() if p.grad is not None]
            found += runner.backward_input(WORK, index, grad)
            after = [p.grad for p in runner.module.parameters() if p.grad is not None]
            same = [*map(torch.equal, before, after)] == [True] * len(after)
            assert same or not leaves, "the first part leaves them"
        else:
            found += runner.backward(WORK, index, grad)
    for index in range(2 if split else 0):
        runner.backward_weight(WORK, index)
    assert runner.num_graphs == 0
    return [torch.empty(0) if grad is None else grad for grad in found]


@pytest.mark.parametrize("free_outputs", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_a_whole_backward(name: str, free_outputs: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    one, other = (ChunkRunner(1, m, free_outputs) for m in (module, twin))
    expected, got = run(other, False, free_outputs), run(one, True, free_outputs)
    assert len(expected) == 2
    assert list(map(torch.equal, expected, got)) == [True] * 2
    for (parameter, mine), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), parameter
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), parameter  # type: ignore[arg-type]


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="torch 2.11 has no such groups"
)
def test_a_checkpoint_is_recomputed_once_in_each_part() -> None:
    layers = [Counted(16, 16) for _ in range(8)]
    runner = ChunkRunner(1, Checkpointed(block=nn.Sequential(*layers)), True)
    run(runner, True, True)
    assert [layer.calls for layer in layers] == [2 * (1 + 2)] * 8, (
        "two microbatches, one forward, two recomputed"
    )


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend="aot_eager")  # type: ignore[return-value]


CANNOT = {compiled: "a compiled function", lambda: Checkpointed(True): "use_reentrant=True"}


@pytest.mark.parametrize("make", CANNOT)
def test_what_cannot_be_split_says_so(make: Callable[[], nn.Module]) -> None:
    runner = ChunkRunner(7, make(), True)
    with pytest.raises(LdtError) as caught:
        run(runner, True, True)
    assert f"chunk 7 ({type(runner.module).__name__}): its backward cannot be split" in str(caught.value)
    assert CANNOT[make] in str(caught.value)


# -- functions that accumulate gradients themselves --------------------------------------------------------------


class Accumulating(torch.autograd.Function):
    """Accumulates the weight's gradient itself, as fused weight gradients do; ``how`` says where to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, owner: Fused) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        more = x.flatten(0, -2).T @ grad.flatten(0, -2)
        owner, how = ctx.owner, ctx.owner.how
        if how == "buffer":
            owner.amax.copy_(grad.abs().max())
        elif how == "another buffer":
            owner.amax = grad.abs().max()
        elif how == "main_grad":
            owner.weight.main_grad += more
        elif how == "data":  # without a version counter
            owner.weight.main_grad.data.add_(more)
        elif how != "returned":
            target = owner.weight if how == "grad" else owner.other
            target.grad = more if target.grad is None else target.grad.add_(more)
        return grad @ weight.T, more if how == "returned" else None, None


class Fused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(16, 16)
        self.weight, self.other = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
        self.weight.main_grad = torch.zeros(16, 16)  # type: ignore[attr-defined]
        self.register_buffer("amax", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Accumulating.apply(self.linear(x), self.weight, self)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("how", ["grad", "main_grad", "data", "returned"])
def test_functions_that_accumulate_run_once(how: str) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(Fused(how), Fused(how)))
    module, twin = made
    one, other = (ChunkRunner(1, m, True) for m in (module, twin))
    for _ in range(2):
        expected, got = run(other, False, True), run(one, True, True, how == "returned")
        assert all(map(torch.equal, expected, got))
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for one_of, other_of in zip(module, twin, strict=True):
        assert torch.equal(one_of.weight.main_grad, other_of.weight.main_grad)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("how", "changed"),
    [("of another", "other.grad"), ("buffer", "amax"), ("another buffer", "amax")],
)
def test_functions_that_would_change_something_twice(how: str, changed: str) -> None:
    runner = ChunkRunner(7, Fused(how), True)
    with pytest.raises(LdtError) as caught:
        run(runner, True, True)
    assert "chunk 7 (Fused): its backward cannot be split" in str(caught.value)
    assert f"it changes {changed} itself" in str(caught.value)
    assert "AccumulatingBackward" in str(caught.value)


def test_a_look_at_many_parameters_is_cheap() -> None:
    """Counts function calls, not seconds: there is one for each parameter if each is checked separately."""
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)])
    watch = FunctionWatch(module)
    watch.begin().check([])  # the first one inspects contents
    mesh: Any = SimpleNamespace(topology=SimpleNamespace(replicas=lambda stage: 1), stage=0)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        watch.begin().check([])
        check_hooks_and_layers({0: module}, None, mesh, per_token=True)
    finally:
        sys.setprofile(None)
    assert calls < 100


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("end", ["run", "drop"])
def test_the_graph_goes_with_its_second_part(end: str) -> None:
    runner = ChunkRunner(1, nn.Sequential(Block(), nn.Linear(16, 16)), True)
    x = torch.randn(2, 8, 16)
    (output,) = runner.detach_outputs(0, runner.forward(WORK, 0, [x], specs_of([x.requires_grad_()])))
    held = weakref.ref(x.untyped_storage())
    del x
    runner.backward_input(WORK, 0, [torch.ones_like(output)])
    assert held() is not None
    runner.backward_weight(WORK, 0) if end == "run" else runner.drop()
    assert held() is None


# -- in a pipeline -----------------------------------------------------------------------------------------------


def split(plan: Plan, late: bool) -> Plan:
    """Return the plan with every B as an I, with its W right after it or at the end of the row."""
    bare = remove_communication(plan)
    rows = {}
    for node, row in bare.rows.items():
        parts: list[Action] = []
        for action in row:
            parts += [
                action._replace(kind=kind)
                for kind in ((Kind.I, Kind.W) if action.kind is Kind.B else [action.kind])
            ]
        if late:
            parts = [a for a in parts if a.kind is not Kind.W] + [a for a in parts if a.kind is Kind.W]
        rows[node] = tuple(parts)
    return add_communication(bare.with_rows(rows, None), plan.lanes or "dedicated")


def whole_and_split(stages: int, laps: int, late: bool, policy: LanePolicy) -> None:
    topology = Topology([1] * stages, laps=laps)
    chunks = toy_chunks(topology)
    plan = split(ushape(topology, 5, lanes=policy), late)
    with ldt.connect(topology, lanes=policy, ranks=range(stages)) as mesh:
        pipeline = build(mesh, chunks, plan=plan)
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(5))


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("stages", "laps"), [(1, 1), (3, 1), (3, 2)])
def test_a_step_with_split_backwards(
    pool: RankPool, stages: int, laps: int, late: bool, policy: LanePolicy
) -> None:
    pool.run(whole_and_split, stages, laps, late, policy, ranks=range(stages))


REFUSED: dict[str, Callable[[], nn.Module]] = {"compiled": compiled, "changes": lambda: Fused("of another")}


def refused(kind: str) -> str:
    topology = Topology([1, 1])
    chunks: list[nn.Module] = [ToyChunk(16), REFUSED[kind](), ToyChunk(16)]
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        pipeline = build(mesh, chunks, plan=split(ushape(topology, 2), False))
        with pytest.raises(LdtError) as caught:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("compiled", "chunk 1 (OptimizedModule): its backward cannot be split: a compiled function"),
        ("changes", "chunk 1 (Fused): its backward cannot be split: it changes other.grad itself"),
    ],
)
def test_what_cannot_be_split_is_named_on_every_rank(pool: RankPool, kind: str, sentence: str) -> None:
    for text in pool.run(refused, kind, ranks=[0, 1]):
        assert sentence in text
