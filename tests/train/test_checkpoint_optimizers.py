"""Optimizers of all kinds are restored exactly; values other than tensors keep their types."""

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
from ldt.train.checkpoint.json_values import from_json, to_json

Make = Callable[[Any], torch.optim.Optimizer]


class Ends(nn.Module):
    """A chunk that may share its weight with another."""

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
        self.state[parameter if of_parameter else "all"] = {"inner": {"a": object()}}


@pytest.mark.parametrize(
    ("of_parameter", "sentence"),
    [
        (True, r"inner of chunk\.0\.linear\.weight in the optimizer\['a'\] is a object"),
        (False, "state under a str"),
    ],
)
def test_state_that_is_not_kept_is_named(
    mesh: ldt.Mesh, tmp_path: Path, of_parameter: bool, sentence: str
) -> None:
    pipeline, optimizer = built(mesh, lambda parameters: Nested(parameters, of_parameter))
    with pytest.raises(ldt.LdtError, match=sentence):
        ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    with pytest.raises(ldt.LdtError, match=sentence):
        ldt.load_checkpoint(tmp_path, pipeline, optimizer)  # before training, there is no state yet


class EightBits(torch.optim.Optimizer):
    """Has state like 8-bit optimizers: bytes, a shared table, other shapes, and nested values."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.table = torch.linspace(-1, 1, 256, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                half = torch.ones(2, dtype=torch.bfloat16)
                state |= {
                    "bytes": torch.zeros(parameter.numel(), dtype=torch.uint8),
                    "table": self.table,
                    "step": 0,
                }
                state |= {
                    "kind": "a text",
                    "nested": {"absmax": [half, (half + 1, None)], 3: torch.tensor(1j)},
                }
            state["step"] += 1
            state["bytes"] += (state["step"] * 40 * (1 + parameter.grad.flatten().sign())).to(torch.uint8)
            moved = state["table"][state["bytes"].long()].view_as(parameter)
            first, (second, _) = state["nested"]["absmax"]
            first.mul_(1.5)
            state["nested"][3].mul_(1 + 1j)
            scale = float(first[0] + second[0]) + state["nested"][3].real.item() + len(state["kind"])
            parameter.sub_((0.001 * scale * moved).to(parameter.dtype))


def of_torch(name: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


OTHERS: dict[str, Make] = {
    "eight bits": EightBits,
    "lbfgs": of_torch("LBFGS", max_iter=3, history_size=4),
    "capturable": of_torch("AdamW", fused=True),
    "averaged": of_torch("ASGD"),
    "maximum": of_torch("Adamax"),
    "momentum that is None": of_torch("SGD", lr=0.1, momentum=0.0),
}
if hasattr(torch.optim, "Muon"):
    OTHERS["muon"] = lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2])


def go_on(pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    x = torch.arange(12.0).view(2, 6) / 12

    def closure() -> Any:
        optimizer.zero_grad()
        return torch.tensor(pipeline.step([(x, -x)]).loss)

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("kind", OTHERS)
def test_state_of_any_build_comes_back(mesh: ldt.Mesh, tmp_path: Path, kind: str) -> None:
    pipeline, optimizer = built(mesh, OTHERS[kind])
    again, other = built(mesh, OTHERS[kind])
    ldt.load_checkpoint(tmp_path, pipeline, optimizer)
    for _ in range(2):
        go_on(pipeline, optimizer)
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    before = repr(optimizer.state_dict())
    ldt.load_checkpoint(tmp_path, again, other)
    assert repr(other.state_dict()) == before
    for _ in range(3):
        go_on(pipeline, optimizer)
        go_on(again, other)
    for mine, theirs in zip(again.parameters(), pipeline.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_state_of_a_whole_group_needs_that_group(mesh: ldt.Mesh, tmp_path: Path) -> None:
    pipeline, optimizer = built(mesh, OTHERS["lbfgs"])
    go_on(pipeline, optimizer)
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    again, other = built(mesh, lambda parameters: torch.optim.LBFGS(list(parameters)[:2]))
    with pytest.raises(
        ldt.CheckpointError, match="may belong to the whole group: load it with the same parameters"
    ):
        ldt.load_checkpoint(tmp_path, again, other)


def test_states_in_single_precision_of_half_parameters(mesh: ldt.Mesh, tmp_path: Path) -> None:
    """torch would cast such states to the parameters' dtype."""

    class Single(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("mean", torch.rand_like(parameter, dtype=torch.float32))

    pipeline, optimizer = built(mesh, Single)
    nn.ModuleList(pipeline.chunks).to(torch.bfloat16)
    optimizer.step()
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    before = repr(optimizer.state_dict())
    optimizer.state.clear()
    ldt.load_checkpoint(tmp_path, pipeline, optimizer)
    assert repr(optimizer.state_dict()) == before


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "in a row": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on(mesh: ldt.Mesh, tmp_path: Path, kind: str) -> None:
    def step(optimizer: Any, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    pipeline, optimizer = built(mesh, KINDS["momentum"])
    scheduler = SCHEDULERS[kind](optimizer)
    for _ in range(3):
        step(optimizer, scheduler)
    ldt.save_checkpoint(tmp_path, pipeline, optimizer, step=1, extra={"scheduler": scheduler})
    again, other = built(mesh, KINDS["momentum"])
    behind = SCHEDULERS[kind](other)
    ldt.load_checkpoint(tmp_path, again, other, extra={"scheduler": behind})
    assert [step(optimizer, scheduler) for _ in range(4)] == [step(other, behind) for _ in range(4)]


def test_an_optimizer_whose_state_is_on_other_ranks_is_refused(mesh: ldt.Mesh, tmp_path: Path) -> None:
    class Elsewhere(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise RuntimeError("has not been consolidated")

    pipeline, optimizer = built(mesh, Elsewhere)
    with pytest.raises(
        ldt.CheckpointError, match="Elsewhere cannot return its state: RuntimeError: has not been"
    ):
        ldt.load_checkpoint(tmp_path, pipeline, optimizer)


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
