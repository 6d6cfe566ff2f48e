"""The first and the last chunk, which both sit on the edge: one takes samples, the other ends in a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ldt.runtime.common.chunk_outputs import as_tensors, merge_tensors, split_tensors
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.aliasing import Aliasing
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.in_flight import own_memory
from ldt.runtime.execution.split_backward import Start
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.data_parallel import GradientSync

__all__ = ["HeadRunner", "TailRunner", "make_runner"]


class HeadRunner(ChunkRunner):
    """Runs on the sample itself; nothing comes over a hop."""

    def forward(
        self, step: StepState, microbatch: int, arrived: Sequence[torch.Tensor], specs: HopSpecs
    ) -> tuple[torch.Tensor, ...]:
        return as_tensors(self.call(step, microbatch, step.microbatches[microbatch].args), self.index)


class TailRunner(ChunkRunner):
    """Its output goes into the loss, or is kept, and not on to a chunk. Its backward starts at the loss.

    What the loss function trains, ``loss_module``, is trained as the tail's own.
    """

    loss_module: nn.Module | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters()
        if self.loss_module is not None:
            yield from self.loss_module.named_parameters("loss_fn")

    def forward(
        self, step: StepState, microbatch: int, arrived: Sequence[torch.Tensor], specs: HopSpecs
    ) -> tuple[torch.Tensor, ...]:
        output = self.run(step, microbatch, arrived, specs)
        del arrived  # before the loss: from here on the graph alone decides what is kept of the input
        target = step.microbatches[microbatch].target
        if step.loss is not None and (target is not None or step.plan.training):
            self._finish(step, microbatch, output, target)
        if step.keep_outputs:
            rest, tensors = split_tensors(output)
            del output
            own_memory(tensors)  # the module may keep theirs, and write to it in its next forward
            step.outputs[microbatch] = merge_tensors(rest, tensors)
        return ()

    def starts(self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]) -> list[Start]:
        assert step.loss is not None
        loss = step.loss.take_root(microbatch)
        return [(loss, torch.ones_like(loss))] if loss.requires_grad else []

    def _finish(self, step: StepState, microbatch: int, output: Any, target: Any) -> None:
        assert step.loss is not None
        loss = step.loss.forward(microbatch, output, target)
        step.nan_check.loss(self.index, microbatch, loss)
        if step.guard is not None:
            step.guard.add_loss(microbatch, loss)
        if step.announced is not None and step.loss.complete:
            step.announced.tell(step.loss.count)


def make_runner(
    mesh: Mesh,
    index: int,
    module: nn.Module,
    free_outputs: bool,
    loss_module: nn.Module | None = None,
    aliasing: Aliasing | None = None,
) -> ChunkRunner:
    """The runner for chunk ``index``: only here, and once, its place in the model makes a difference."""
    kind = {0: HeadRunner, mesh.topology.tail: TailRunner}.get(index, ChunkRunner)
    shared = mesh.topology.served > 1 and not mesh.is_edge
    sync = GradientSync(module, divisor=mesh.topology.edge_dp if shared else None)
    runner = kind(index, module, mesh.device, free_outputs, mesh.shards, sync, aliasing)
    if isinstance(runner, TailRunner):
        runner.loss_module = loss_module
    return runner
