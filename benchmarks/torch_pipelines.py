"""Steps by torch.distributed.pipelining: its runtime on the placement and order of a plan, and its 1F1B without a U."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from transports import new_group

from ldt.plan import Plan, to_csv

__all__ = ["Step", "step_in_a_row", "step_of_plan"]

Step = Callable[[], object]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Microbatch = tuple[torch.Tensor, torch.Tensor]


def step_of_plan(
    plan: Plan, chunks: Mapping[int, nn.Module], microbatches: Sequence[Microbatch], loss_fn: Loss
) -> Step:
    """Return a step with ``plan``'s compute order, for which torch places its own sends and receives.

    ``chunks`` are this rank's, by number. Stages have one rank each: rank s is stage s. Every rank calls it.
    """
    device, group = _where(microbatches)
    number = plan.topology.num_chunks
    stages = [PipelineStage(module, index, number, device, group=group) for index, module in chunks.items()]
    schedule = schedules._PipelineScheduleRuntime(stages, len(microbatches), loss_fn=loss_fn)  # type: ignore
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "order.csv"
        file.write_text(to_csv(plan))
        schedule._load_csv(str(file))
    return _step(schedule, microbatches, first=0 in chunks, last=number - 1 in chunks)


def step_in_a_row(module: nn.Module, microbatches: Sequence[Microbatch], loss_fn: Loss) -> Step:
    """Return a step of torch's one-forward-one-backward with ``module`` as this rank's stage. Every rank calls it."""
    device, group = _where(microbatches)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(module, rank, ranks, device, group=group)
    schedule = Schedule1F1B(stage, len(microbatches), loss_fn=loss_fn)
    return _step(schedule, microbatches, first=rank == 0, last=rank == ranks - 1)


def _where(microbatches: Sequence[Microbatch]) -> tuple[torch.device, Any]:
    """Return the device, and a group of all ranks that nothing else uses."""
    device = microbatches[0][0].device
    return device, new_group(range(dist.get_world_size()), device)


def _step(schedule: Any, microbatches: Sequence[Microbatch], first: bool, last: bool) -> Step:
    """Pass a whole batch, which torch cuts into views; do not return outputs, as torch does by default."""
    inputs, targets = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
    options: dict[str, Any] = {"target": targets, "losses": []} if last else {}
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        options["return_outputs"] = False
    return lambda: schedule.step(*([inputs] if first else []), **options)
