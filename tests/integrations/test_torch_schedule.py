"""Schedule: losses, outputs and gradients of torch's own schedule over the whole model in one stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec

import ldt
from ldt.integrations.pipelining import Schedule
from ldt.testing import RankPool, ToyChunk
from ldt.topology import Topology

WORLD_SIZE = 3
WIDTH, NUMBER = 16, 4


class Head(ToyChunk):
    """Takes a positional argument, and a keyword argument that is split as well."""

    def forward(self, x: Tensor, shift: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x + shift) * factor


class Whole(nn.Module):
    def __init__(self, chunks: list[nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        head, *rest = self.chunks
        output: Tensor = nn.Sequential(*rest)(head(x, **kwargs))
        return output


def mean_error(output: Tensor, target: Tensor, power: int = 2) -> Tensor:
    return (output - target).abs().pow(power).mean()


def sum_error(output: Tensor, target: Tensor, power: int = 2) -> Tensor:
    return (output - target).abs().pow(power).sum()


def make(topology: Topology) -> tuple[list[nn.Module], dict[str, Any]]:
    torch.manual_seed(3)
    chunks = [Head(WIDTH), *(ToyChunk(WIDTH) for _ in range(topology.num_chunks - 1))]
    rows = 2 * NUMBER + 1  # microbatches of two sizes
    batch = {
        "x": torch.randn(rows, WIDTH),
        "shift": torch.randn(rows, WIDTH),
        "target": torch.randn(rows, WIDTH),
    }
    return chunks, batch


def of_torch(
    chunks: list[nn.Module], batch: dict[str, Any], loss_fn: Any, is_mean: bool
) -> tuple[Whole, list[Any]]:
    """The model with the gradients of a step, and losses and outputs of an eval and of that step."""
    whole = Whole(copy.deepcopy(chunks))
    groups = [dist.new_group([rank]) for rank in range(WORLD_SIZE)]
    stage = PipelineStage(whole, 0, 1, torch.device("cpu"), group=groups[dist.get_rank()])
    schedule = ScheduleGPipe(stage, NUMBER, loss_fn, scale_grads=is_mean)
    found = []
    for call in (schedule.eval, schedule.step):  # its eval divides gradients, too
        losses: list[Tensor] = []
        kwargs = {"shift": batch["shift"], "factor": 0.5, "loss_kwargs": {"power": 3}}
        found.append((losses, call(batch["x"], target=batch["target"], losses=losses, **kwargs)))
    return whole, found


def arguments(batch: dict[str, Any], is_split: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the edge passes: a whole batch, or microbatches."""
    if not is_split:
        return (batch["x"],), {"shift": batch["shift"], "factor": 0.5, "target": batch["target"]}
    x, shift, target = (batch[name].tensor_split(NUMBER) for name in ("x", "shift", "target"))
    kwarg_mbs = [{"shift": one, "factor": 0.5} for one in shift]
    return (), {"arg_mbs": [(one,) for one in x], "kwarg_mbs": kwarg_mbs, "target_mbs": target}


def compare(reduction: Any, is_split: bool) -> None:
    topology = Topology([1, 1, 1])
    chunks, batch = make(topology)
    loss_fn = mean_error if reduction == "mean" else sum_error
    whole, expected = of_torch(chunks, batch, loss_fn, reduction == "mean")
    with ldt.connect(topology) as mesh:
        indices = topology.chunks_of(mesh.stage)
        mine = [chunks[index] for index in indices]
        of_edge = loss_fn if mesh.is_edge else None
        schedule = Schedule(ldt.Pipeline(mine, mesh, loss_fn=of_edge, loss_reduction=reduction), NUMBER)
        args, kwargs = arguments(batch, is_split) if mesh.is_edge else ((), {})
        for call, (wanted_losses, wanted) in zip((schedule.eval, schedule.step), expected, strict=True):
            losses = [torch.zeros(())]
            output = call(*args, **kwargs, losses=losses, loss_kwargs={"power": 3})
            if mesh.is_edge:
                assert torch.equal(output, wanted)
                assert len(losses) == NUMBER
                assert all(map(torch.equal, losses, wanted_losses))
                assert not any(loss.requires_grad for loss in losses)
            else:
                assert (output, losses) == (None, [])
        for index in indices:
            for got, of_whole in zip(
                chunks[index].parameters(), whole.chunks[index].parameters(), strict=True
            ):
                torch.testing.assert_close(got.grad, of_whole.grad)
        assert schedule.step(*args, **kwargs, return_outputs=False) is None


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_results_are_those_of_a_schedule_of_torch(pool: RankPool, reduction: str, is_split: bool) -> None:
    pool.run(compare, reduction, is_split)


def along_another_dimension() -> None:
    topology = Topology([1, 1, 1])
    chunks, _ = make(topology)
    x = torch.randn(2, 8, WIDTH)
    with torch.no_grad():
        expected = Whole(chunks)(x, shift=x)
    with ldt.connect(topology) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        spec = {
            "args_chunk_spec": (TensorChunkSpec(1),),
            "kwargs_chunk_spec": {"shift": TensorChunkSpec(1)},
            "output_merge_spec": TensorChunkSpec(1),
        }
        schedule = Schedule(ldt.Pipeline(mine, mesh), NUMBER, **spec)
        if mesh.is_edge:
            torch.testing.assert_close(schedule.eval(x, shift=x), expected)
        else:
            schedule.eval()


def test_batches_are_split_and_merged_as_the_specs_say(pool: RankPool) -> None:
    pool.run(along_another_dimension)


def refused(edge: dict[str, Any], cloud: dict[str, Any]) -> str:
    topology = Topology([1, 1, 1])
    chunks, _ = make(topology)
    with ldt.connect(topology) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        schedule = Schedule(ldt.Pipeline(mine, mesh, loss_fn=mean_error if mesh.is_edge else None), NUMBER)
        with pytest.raises(ldt.LdtError) as caught:
            schedule.step(**(edge if mesh.is_edge else cloud))
        return str(caught.value)


ROWS = torch.ones(NUMBER, WIDTH)


@pytest.mark.parametrize(
    ("edge", "cloud", "expected"),
    [
        ({"arg_mbs": [ROWS] * 3}, {}, "args: expected 4 microbatches, got 3"),
        ({"arg_mbs": [ROWS] * 4, "target_mbs": [ROWS]}, {}, "target: expected 4 microbatches, got 1"),
        ({"arg_mbs": []}, {}, "args: expected 4 microbatches, got 0"),
        ({"arg_mbs": ROWS}, {}, "arg_mbs must be a list with an entry per microbatch, got Tensor"),
        ({"kwarg_mbs": {"x": ROWS}}, {}, "kwarg_mbs must be a list with an entry per microbatch, got dict"),
        ({"kwarg_mbs": [ROWS] * 4}, {}, "kwarg_mbs[0] must be a dict, got Tensor"),
        ({"arg_mbs": [ROWS] * 4, "shift": ROWS}, {}, "give a whole batch, or arg_mbs="),
        ({"arg_mbs": [ROWS] * 4, "target": ROWS}, {}, "give a whole batch, or arg_mbs="),
        ({"x": ROWS, "shift": ROWS, "target": ROWS}, {"x": ROWS}, "only the edge, stage 0, has samples"),
    ],
)
def test_wrong_arguments_are_named_on_all_ranks(
    pool: RankPool, edge: dict[str, Any], cloud: dict[str, Any], expected: str
) -> None:
    for text in pool.run(refused, edge, cloud):
        assert expected in text


def test_a_schedule_has_microbatches() -> None:
    with pytest.raises(ValueError, match="n_microbatches must be 1 or more, got 0"):
        Schedule(None, 0)  # type: ignore[arg-type]
