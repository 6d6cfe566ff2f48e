"""Chunks from traced models equal the unsplit model: skips, tied weights, inputs of the tail; and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

import ldt
from ldt.integrations.pipelining import from_pipe
from ldt.testing import RankPool

WORLD_SIZE = 3
TOPOLOGY = ldt.Topology([1, 1, 1])
WIDTH, ROWS, MICROBATCHES = 8, 4, 3


class Layers(nn.Module):
    """Four layers, which ``how`` connects."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if how == "tied on the edge":
            self.head.weight = self.layers[0].weight
        if how == "tied to the cloud":
            self.head.weight = self.layers[1].weight

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        places = torch.arange(WIDTH) / WIDTH if self.how == "a constant" else None
        first = torch.tanh(self.layers[0](x if places is None else x + places))
        aside = torch.sigmoid(first) if self.how == "a U" else None
        second = torch.tanh(self.layers[1](first))
        if self.how == "an input on the cloud":
            second = second + y
        if self.how == "two values":
            second, first = second * 2, first + second
        third = torch.tanh(self.layers[2](second + first if self.how in ("a skip", "two values") else second))
        if places is not None:
            third = third * places
        last = self.layers[3](third + first if self.how == "a skip over all" else third)
        if aside is not None:
            last = last * aside
        if self.how == "an input of the tail":
            last = last * y
        return self.head(last)


def model_of(how: str) -> Layers:
    torch.manual_seed(0)
    return Layers(how)


def microbatches(how: str) -> list[Any]:
    torch.manual_seed(1)
    made = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(MICROBATCHES)]
    takes_y = "an input" in how
    return [({"x": x, "y": y} if takes_y else {"x": x}, torch.randn(ROWS, WIDTH)) for x, y in made]


def traced(how: str, device: str = "cpu", points: tuple[int, ...] = (1, 2, 3)) -> tuple[Any, Layers]:
    model = model_of(how).to(device)
    example = {name: tensor.to(device) for name, tensor in microbatches(how)[0][0].items()}
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in points}
    return pipeline(model, mb_args=(), mb_kwargs=example, split_spec=spec), model


def step_as_unsplit(how: str, device: str) -> dict[str, int]:
    """Compare a step with the unsplit model. Returns the bytes of each channel of activations, as this rank saw it."""
    expected = model_of(how)
    for inputs, target in microbatches(how):
        (nn.functional.mse_loss(expected(**inputs), target) / MICROBATCHES).backward()
    gradients = {name: p.grad for name, p in expected.named_parameters(remove_duplicate=False)}
    pipe, model = traced(how, device)
    chunks = from_pipe(pipe, TOPOLOGY, model)
    with ldt.connect(TOPOLOGY) as mesh:
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        for chunk in mine:
            chunk.to_empty(device="cpu") if device == "meta" else chunk
            state = {name: expected.state_dict()[chunk.whole_model_name(name)] for name in chunk.state_dict()}
            chunk.load_state_dict(copy.deepcopy(state))
        if how == "tied on the edge" and mesh.is_edge:
            assert (
                mine[0].stage.get_submodule("layers.0").weight is mine[1].stage.get_submodule("head").weight
            )
        step = ldt.Pipeline(mine, mesh, loss_fn=nn.functional.mse_loss if mesh.is_edge else None)
        result = step.step(microbatches(how) if mesh.is_edge else None)
        tied = "tied" in how
        for chunk in mine:
            for name, parameter in chunk.named_parameters():
                got, wanted = parameter.grad, gradients[chunk.whole_model_name(name)]
                assert got is not None
                assert torch.allclose(got, wanted) if tied else torch.equal(got, wanted), name
        channels = result.stats.channels.items()
        return {name[:2]: traffic.bytes for name, traffic in channels if name.startswith("F")}


WAYS = [
    "in a row",
    "a skip",
    "a skip over all",
    "a U",
    "a constant",
    "two values",
    "an input of the tail",
    "tied on the edge",
]
BYTES = 4 * ROWS * WIDTH * MICROBATCHES  # of one tensor


@pytest.mark.parametrize("how", WAYS)
def test_a_step_equals_the_unsplit_model(pool: RankPool, how: str) -> None:
    pool.run(step_as_unsplit, how, "cpu")


@pytest.mark.parametrize("how", ["a U", "a constant"])
def test_what_the_node_has_or_can_compute_does_not_cross(pool: RankPool, how: str) -> None:
    """Each hop carries one tensor: the tail has what the head kept, and each chunk its constants."""
    for found in pool.run(step_as_unsplit, how, "cpu"):
        assert set(found.values()) == {BYTES}


def test_a_skip_within_the_cloud_crosses(pool: RankPool) -> None:
    edge, first, _ = pool.run(step_as_unsplit, "a skip over all", "cpu")
    assert edge == {"F0": BYTES, "F2": BYTES}
    assert first == {"F0": BYTES, "F1": 2 * BYTES}


def test_a_model_may_be_traced_without_memory(pool: RankPool) -> None:
    pool.run(step_as_unsplit, "a skip", "meta")


def test_names_are_those_of_the_model() -> None:
    pipe, model = traced("a skip")
    chunks = from_pipe(pipe, TOPOLOGY, model)
    names = [chunk.whole_model_name(name) for chunk in chunks for name in chunk.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    again = copy.deepcopy(chunks[0])
    x = torch.randn(ROWS, WIDTH)
    before = again(x)
    nn.init.zeros_(chunks[0].stage.get_submodule("layers.0").weight)
    assert all(torch.equal(a, b) for a, b in zip(again(x), before, strict=True))  # a copy has its own weights


@pytest.mark.parametrize(
    ("how", "points", "sentence"),
    [
        ("in a row", (1, 2), r"split into 3 stages, but tp=1,1,1 .* has 4 chunks"),
        (
            "tied to the cloud",
            (1, 2, 3),
            r"stages 1 and 3 share the parameter head.weight, but run on different",
        ),
        (
            "an input on the cloud",
            (1, 2, 3),
            r"stage 1 runs on the cloud and needs the model's inputs y, which",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(how: str, points: tuple[int, ...], sentence: str) -> None:
    pipe, model = traced(how, points=points)
    with pytest.raises(ValueError, match=sentence):
        from_pipe(pipe, TOPOLOGY, model)
