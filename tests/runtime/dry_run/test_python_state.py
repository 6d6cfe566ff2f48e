"""Tests Python state of chunks: copied for dry runs; gradients are uncertain only if it changes in each forward."""

from __future__ import annotations

import collections
import itertools
import random
import sys
import weakref
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from uncertain_chunks import ONE, Alternating, First, steps

from ldt.errors import LdtError
from ldt.runtime import TensorSpec
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.dry_run.grad_flow import Reach
from ldt.runtime.dry_run.shape_inference import infer_reach, infer_specs
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 2
CPU = torch.device("cpu")

# -- what is copied ----------------------------------------------------------------------------------------------


class Item:
    def __init__(self) -> None:
        self.seen: list[Any] = []


class InCollections(nn.Module):
    """Has objects in sets and as keys, and nested iterators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.a_set, self.frozen, self.a_dict = {Item()}, frozenset({Item()}), {Item(): Item()}
        self.layers, self.ordered = {self.linear: 3}, collections.OrderedDict({self.linear: Item()})
        self.weak: Any = weakref.WeakKeyDictionary({self.linear: Item()})
        self.steps, self.turns = iter(range(9)), itertools.cycle([1, 2, 3])
        self.pairs = enumerate(zip(iter([4, 5, 6]), itertools.count(7, 2), strict=False))

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers[self.linear] == 3
        for item in self.items():
            item.seen.append(x)
        for iterator in (self.steps, self.turns, self.pairs):
            next(iterator)  # type: ignore[call-overload]
        return self.linear(x)  # type: ignore[no-any-return]

    def items(self) -> list[Item]:
        of_layer = [self.ordered[self.linear], self.weak[self.linear]]
        return [*self.a_set, *self.frozen, *self.a_dict, *self.a_dict.values(), *of_layer]

    def left(self) -> Any:
        return [item.seen for item in self.items()], next(self.steps), next(self.turns), next(self.pairs)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_leaves_collections_as_they_were(training: bool) -> None:
    module, before = InCollections(), InCollections().left()
    infer_specs(0, module, (torch.ones(2, 4),), {}, CPU, training)
    assert module.left() == before
    module(torch.ones(2, 4))
    assert module.left() != before, "this test needs a forward that leaves something"


MANY = list(range(300_000))


class Naming(nn.Module):
    """Names a global with many entries."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            MANY.append(x)  # type: ignore[arg-type]
        return x * len(MANY)


def test_large_containers_are_not_searched() -> None:
    """Counted in function calls, not in seconds. A tensor that a dry run cannot remove there is still refused."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    infer_specs(0, nn.Linear(4, 4), (torch.ones(2, 4),), {}, CPU, True)  # the first imports much
    sys.setprofile(count)
    try:
        infer_specs(0, Naming(keeps=False), (torch.ones(2, 4),), {}, CPU, True)
    finally:
        sys.setprofile(None)
    assert calls < len(MANY) / 2
    with pytest.raises(LdtError, match="its forward keeps tensors that a dry run cannot remove"):
        infer_specs(0, Naming(keeps=True), (torch.ones(2, 4),), {}, CPU, True)
    del MANY[300_000:]


class Circular(nn.Linear):
    """A hook that holds its own tensor: a reference cycle."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad + 0 * y)
        return y


def test_a_tensor_in_a_reference_cycle_is_refused() -> None:
    with pytest.raises(LdtError, match="in a reference cycle"):
        infer_specs(0, Circular(4, 4), (torch.ones(2, 4),), {}, CPU, True)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = (number for number in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.source)


def test_an_iterator_that_cannot_be_rewound_is_refused() -> None:
    module = Taking()
    with pytest.raises(LdtError, match=r"its forward advances a generator, which a dry run cannot rewind"):
        infer_specs(0, module, (torch.ones(2, 4),), {}, CPU, True)
    assert next(module.source) == 0


# -- what moves in each forward ----------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("calls",)


class Turn(Enum):
    LEFT, RIGHT = 0, 1


def count_in_slots(kept: Slotted) -> None:
    kept.calls = getattr(kept, "calls", 0) + 1


# What a chunk keeps, and what moves it in each forward.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda: SimpleNamespace(it=(0, "a")), lambda kept: setattr(kept, "it", (kept.it[0] + 1, "a"))),
    "list anew": (lambda: SimpleNamespace(it=[0]), lambda kept: setattr(kept, "it", [kept.it[0] + 1])),
    "dict anew": (
        lambda: SimpleNamespace(it={}),
        lambda kept: setattr(kept, "it", {len(kept.it): 0, **kept.it}),
    ),
    "frozenset": (
        lambda: SimpleNamespace(it=frozenset()),
        lambda kept: setattr(kept, "it", kept.it | {len(kept.it)}),
    ),
    "enum": (
        lambda: [Turn.LEFT],
        lambda kept: kept.append(Turn.RIGHT if kept.pop() is Turn.LEFT else Turn.LEFT),
    ),
    "random": (random.Random, lambda kept: kept.random()),
    "numpy": (numpy.random.default_rng, lambda kept: kept.random()),
    "array": (lambda: numpy.zeros(2), lambda kept: kept.__iadd__(1)),
    "slots": (Slotted, count_in_slots),
    "set": (set, lambda kept: kept.add(len(kept))),
    "dict of layers": (dict, lambda kept: kept.update({len(kept): nn.Identity()})),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle("ab"), next),
    "iterator": (lambda: iter(range(99)), next),
}


class Keeping(First):
    def __init__(self, kept: Any, move: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept, self.move = kept, move

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.move(self.kept)
        return super().forward(x)


@pytest.mark.parametrize("name", KEPT)
def test_state_that_changes_in_each_forward_makes_gradients_uncertain(name: str) -> None:
    make, move = KEPT[name]
    hop = [TensorSpec((4, 16), torch.float32, requires_grad=True)]
    for module, reach in (
        (Keeping(make(), move), Reach(maybe=(0,))),
        (Keeping(make(), id), Reach(sure=(0,))),
    ):
        assert infer_reach(module, hop, {}, CPU, NodeShards()).reaches == (reach,)


class AtFirst(Alternating):
    """Detaches in its first forward only."""

    def forward(self, x: Tensor) -> Tensor:
        calls, self.calls = self.calls, 1
        return First.forward(self, x if calls else x.detach())


class Filling(Alternating):
    """Fills a cache in its first forward."""

    cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        self.cache = {"scale": 1.0, "calls": 1} if self.cache is None else self.cache
        return First.forward(self, x * self.cache["scale"])


class Tallying(Filling):
    """Counts in an object that its first forward creates."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.cache["calls"] += 1
        return output


def test_state_that_changes_in_the_first_forward_only(pool: RankPool) -> None:
    """Gradients are certain if that forward takes the same branches as the next."""
    cases: dict[str, tuple[list[Any], int]] = {
        "one, not used in the first forward": ([First, AtFirst, First], ONE + 4),
        "one, and a cache that is filled once": ([First, Filling, First], ONE),
        "one, and a cache that is filled once by the tail": ([First, First, Filling], ONE),
        "one, and a count": ([First, Tallying, First], ONE + 4),
    }
    found = pool.run(steps, {name: kinds for name, (kinds, _) in cases.items()}, Topology([1, 1]))
    assert found == [{name: [nbytes] * 3 for name, (_, nbytes) in cases.items()}] * 2
