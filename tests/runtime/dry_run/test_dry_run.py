"""Tests that a dry run has no side effects on hooks, counters, caches, random generators and modes."""

from __future__ import annotations

import collections
import functools
import itertools
import queue
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn
from torch.nn.modules import module as nn_modules
from torch.nn.utils import parametrizations, weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ldt
from ldt.errors import LdtError
from ldt.runtime import TensorSpec
from ldt.runtime.dry_run.shape_inference import infer_specs
from ldt.testing import RankPool, ToyChunk, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
CPU = torch.device("cpu")
SEEN: list[Any] = []
COUNT = 0
DICE = random.Random(3)


def shapes_of(module: nn.Module, training: bool = True) -> tuple[TensorSpec, ...]:
    return infer_specs(0, module, (torch.ones(2, 4),), {}, CPU, training)


# -- what a forward leaves behind --------------------------------------------------------------------------------


@dataclass
class Cache:
    tensors: dict[str, Any] = field(default_factory=dict)
    nested: Any = field(default_factory=lambda: SimpleNamespace(seen=[[]], last=None))
    calls: int = 0


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = "before"


class Base(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        return self.linear(x)  # type: ignore[no-any-return]

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError

    def left(self) -> Any:
        """Return all state that a dry run could change."""
        raise NotImplementedError


class InObjects(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache, self.slotted = Cache(), Slotted()
        self.queue: collections.deque[Any] = collections.deque(["before"])
        self.ids = itertools.count()
        self.array = numpy.zeros(2)
        self.weak: Any = weakref.WeakKeyDictionary({self.linear: "before"})
        self.pair: tuple[Cache, list[Any]] = (Cache(), [0])

    def keep(self, x: Tensor) -> None:
        self.cache.tensors["x"] = x
        self.cache.nested.seen[0].append(x)
        self.cache.nested.last = x
        self.cache.calls += 1
        self.slotted.last = x
        self.queue.append(x)
        self.weak[self.linear] = x
        self.array += next(self.ids) + 1
        self.pair[0].tensors["x"] = self.pair[1][0] = x

    def left(self) -> Any:
        objects = [self.cache, self.slotted.last, list(self.queue), self.array.tolist(), self.pair]
        return repr([*objects, next(self.ids), self.weak[self.linear]])


class InClassAndGlobals(Base):
    def keep(self, x: Tensor) -> None:
        global COUNT  # noqa: PLW0603 (that is the point)
        COUNT += 1
        SEEN.append(x)
        type(self).calls += 1
        type(self).last = x  # type: ignore[attr-defined]
        DICE.random()

    def left(self) -> Any:
        return COUNT, list(SEEN), type(self).calls, hasattr(type(self), "last"), DICE.getstate()


def closing() -> Base:
    calls, seen = 0, []

    class InClosure(Base):
        def keep(self, x: Tensor) -> None:
            nonlocal calls
            calls += 1
            seen.append(x)

        def left(self) -> Any:
            return calls, list(seen)

    return InClosure()


class Patched(Base):
    """Its forward is patched on the instance, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.forward = functools.partial(Patched.patched, self)  # type: ignore[method-assign]

    def patched(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.linear(x)  # type: ignore[no-any-return]

    def left(self) -> Any:
        return list(self.seen)


class Generators(Base):
    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python, self.numpy = torch.Generator(), random.Random(1), numpy.random.default_rng(1)

    def keep(self, x: Tensor) -> None:
        self.torch.manual_seed(7)
        torch.manual_seed(7)
        for draw in (self.python.random, self.numpy.random, random.random, numpy.random.rand):
            draw()
        nn.functional.dropout(x)

    def left(self) -> Any:
        own = [self.torch.get_state().tolist(), self.python.getstate(), str(self.numpy.bit_generator.state)]
        return [*own, random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]


KEEPERS: dict[str, Callable[[], Base]] = {
    "objects": InObjects,
    "class and globals": InClassAndGlobals,
    "closure": closing,
    "patched forward": Patched,
    "random generators": Generators,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KEEPERS)
def test_a_forward_leaves_nothing_behind(name: str, training: bool) -> None:
    module, twin = KEEPERS[name](), KEEPERS[name]()
    before = twin.left()
    shapes_of(module, training)
    assert module.left() == before
    module(torch.ones(2, 4))
    assert module.left() != before, "this test needs a forward that leaves something"
    SEEN.clear()


class Leaking(Base):
    queue: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def keep(self, x: Tensor) -> None:
        self.queue.put(x)


@functools.cache
def ramp(size: int) -> Tensor:
    return torch.arange(float(size))


data: list[str] = []
add_data = data.append  # as another thread would


class Remembering(Base):
    @functools.cache  # noqa: B019 (that is the point)
    def shift(self, size: int) -> Tensor:
        data_of = self.linear.weight.data  # an attribute, and no global
        add_data("written meanwhile")
        return ramp(size) + data_of.sum()

    def keep(self, x: Tensor) -> None:
        x + self.shift(4)


def test_state_of_functions_is_restored_and_writes_of_others_are_kept() -> None:
    assert shapes_of(Remembering()) == shapes_of(nn.Linear(4, 4))
    assert type(ramp(4)) is Tensor
    assert data == ["written meanwhile"]


def test_state_that_cannot_be_restored_is_refused() -> None:
    with pytest.raises(
        LdtError, match=r"cannot tell what chunk 0 \(Leaking\) returns .* its forward keeps tensors"
    ):
        shapes_of(Leaking())


class Closing:
    """Has a ``__del__`` that closes something."""

    def __init__(self) -> None:
        self.open = [True]

    def __del__(self) -> None:
        self.open[0] = False


def test_an_object_with_a_destructor_is_not_destroyed() -> None:
    module = Base()
    module.keep = lambda x: None  # type: ignore[method-assign]
    module.handle = Closing()  # type: ignore[assignment]
    shapes_of(module)
    assert module.handle.open == [True]  # type: ignore[union-attr]


# -- hooks and modes ---------------------------------------------------------------------------------------------


class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class SeeingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """Install every kind of hook and mode that can observe a forward."""
    see = lambda *unused: SEEN.append("hook")  # noqa: E731
    handles = [
        module.register_forward_hook(see),
        module.register_forward_pre_hook(see),
        module.register_full_backward_hook(see),
        nn_modules.register_module_forward_hook(see),
        nn_modules.register_module_forward_pre_hook(see),
        *(p.register_hook(see) for p in module.parameters()),  # type: ignore[no-untyped-call]
    ]

    def pack(tensor: Tensor) -> Tensor:
        SEEN.append("saved")
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        with Seeing(), SeeingFunctions(), saved:  # type: ignore[no-untyped-call]
            yield
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_and_modes_do_not_see_a_dry_run() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    counter, x = FlopCounterMode(display=False), torch.ones(2, 4)
    with hooked(module), counter, torch.autocast("cpu", torch.bfloat16):
        SEEN.clear()
        (spec,) = infer_specs(0, module, (x,), {}, CPU, True)
        assert SEEN == []
        assert counter.get_total_flops() == 0
        module(x).sum().backward()
        assert counter.get_total_flops() > 0
    assert {"hook", "saved"} <= {entry for entry in SEEN if isinstance(entry, str)}
    assert spec.dtype == torch.bfloat16
    SEEN.clear()


def test_tensors_are_made_where_the_default_device_says() -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.empty(1).device.type == "meta"
            return x

    with torch.device("meta"):
        infer_specs(0, Making(), (torch.ones(2, device="meta"),), {}, torch.device("meta"), False)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=False)  # type: ignore[no-any-return]


def compiled_in_place() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    return module


ODD: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
    "compiled in place": compiled_in_place,
    "tied": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "weight norm by hooks": lambda: weight_norm(nn.Linear(4, 4)),
    "lstm": lambda: nn.Sequential(nn.LSTM(4, 4, batch_first=True), Take()),
    "checkpoint": Recomputed,
}


class Take(nn.Module):
    def forward(self, outputs: Any) -> Tensor:
        return outputs[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("name", ODD)
def test_modules_of_many_kinds(name: str) -> None:
    module = ODD[name]()
    assert shapes_of(module) == (TensorSpec((2, 4), torch.float32, requires_grad=True),)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


# -- in steps ----------------------------------------------------------------------------------------------------


class Caching(ToyChunk):
    """A cache in a plain object, used in the next forward."""

    def __init__(self) -> None:
        super().__init__(16)
        self.cache = SimpleNamespace(mean=None, calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.calls += 1
        output = super().forward(x if self.cache.mean is None else x + self.cache.mean)
        self.cache.mean = x.detach().mean()
        return output


def caches(hook: bool) -> list[float]:
    topology = Topology([1, 1])
    torch.manual_seed(0)
    chunks: list[Any] = [Caching(), Caching(), ToyChunk(16)]
    seen: list[float] = []
    with ldt.connect(topology) as mesh:
        pipeline = build(mesh, chunks)
        chunk: Any = pipeline.chunks[0]
        if hook:
            chunk.register_forward_hook(lambda module, args, output: seen.append(output.sum().item()))
        for _ in range(2):
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(3))
            for other in chunks:
                if other is not chunk and isinstance(other, Caching):
                    other.cache = SimpleNamespace(mean=None, calls=0)
            pipeline.forget_shapes()
            chunk.cache.mean = None
        assert chunk.cache.calls == 6
    return seen


@pytest.mark.parametrize("hook", [False, True])
def test_a_cache_in_an_object_and_a_hook_that_reads(pool: RankPool, hook: bool) -> None:
    for seen in pool.run(caches, hook):
        assert len(seen) >= 6 * hook
