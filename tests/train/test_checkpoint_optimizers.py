"""Optimizers of all kinds come back as they were; values beside tensors keep their types."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import ldt
from ldt.topology import Topology
from ldt.train.checkpoint.values import from_json, to_json

Make = Callable[[Any], torch.optim.Optimizer]


class Ends(nn.Module):
    """One chunk. Its weight may be another's, too."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        if weight is not None:
            self.linear.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.fixture
def mesh() -> Iterator[ldt.Mesh]:
    with ldt.connect(Topology([1])) as made:
        yield made


def built(mesh: ldt.Mesh, make: Make, tied: bool = False) -> tuple[ldt.Pipeline, torch.optim.Optimizer]:
    head = Ends()
    pipeline = ldt.Pipeline([head, Ends(head.linear.weight if tied else None)], mesh, loss_fn=mse_loss)
    return pipeline, make(pipeline.parameters())


def train(pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    x = torch.arange(12.0).view(2, 6) / 12
    pipeline.step([(x, -x)])
    optimizer.step()
    optimizer.zero_grad()


KINDS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "rows and columns": torch.optim.Adafactor,
    "step sizes": torch.optim.Rprop,
    "names": lambda p: torch.optim.RMSprop([(f"w{i}", parameter) for i, parameter in enumerate(p)]),
}


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_load_are_those_before(
    mesh: ldt.Mesh, tmp_path: Path, kind: str, stepped: bool
) -> None:
    pipeline, optimizer = built(mesh, KINDS[kind])
    if stepped:
        train(pipeline, optimizer)
    optimizer.param_groups[0]["lr"] *= 0.5
    before = copy.deepcopy(optimizer.state_dict())
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    assert str(optimizer.state_dict()) == str(before), "saving changes nothing"
    again, other = built(mesh, KINDS[kind])
    train(again, other)
    ldt.load_checkpoint(tmp_path, again, other)
    assert str(other.state_dict()) == str(before)
    for _ in range(2):
        train(pipeline, optimizer)
        train(again, other)
    for mine, theirs in zip(again.parameters(), pipeline.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("one", "other"), [(True, False), (False, True), (True, True)])
def test_weights_that_are_tied_in_one_model_alone(
    mesh: ldt.Mesh, tmp_path: Path, one: bool, other: bool
) -> None:
    pipeline, optimizer = built(mesh, torch.optim.AdamW, tied=one)
    train(pipeline, optimizer)
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    again, another = built(mesh, torch.optim.AdamW, tied=other)
    ldt.load_checkpoint(tmp_path, again, another)
    head, tail = (chunk.linear for chunk in pipeline.chunks)
    for chunk, expected in zip(again.chunks, (head, head if other else tail), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found, wanted = another.state[chunk.linear.weight][name], optimizer.state[expected.weight][name]
            assert torch.equal(found, wanted)
        assert torch.equal(chunk.linear.weight, expected.weight)


class Nested(torch.optim.SGD):
    def __init__(self, parameters: Any, of_parameter: bool) -> None:
        super().__init__(parameters)
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter if of_parameter else "all"] = {"inner": {"a": torch.zeros(2)}}


@pytest.mark.parametrize(
    ("of_parameter", "sentence"),
    [
        (True, r"inner of chunk\.0\.linear\.weight in the optimizer\['a'\] is a Tensor"),
        (False, "state under a str"),
    ],
)
def test_state_that_is_not_kept_is_named(
    mesh: ldt.Mesh, tmp_path: Path, of_parameter: bool, sentence: str
) -> None:
    pipeline, optimizer = built(mesh, lambda parameters: Nested(parameters, of_parameter))
    with pytest.raises(ldt.LdtError, match=sentence):
        ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)


KEYS = st.one_of(st.text(max_size=8), st.integers(), st.sampled_from(["$tuple", "$pairs"]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_keep_their_types(value: Any) -> None:
    assert repr(from_json(to_json(value, "value"))) == repr(value)


def test_counts_and_numbers_in_tensors() -> None:
    assert from_json(to_json(Counter({30: 1}), "milestones")) == {30: 1}
    assert to_json(torch.tensor(0.1, dtype=torch.float64), "lr") == 0.1
