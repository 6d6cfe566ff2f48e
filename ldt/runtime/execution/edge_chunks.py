"""Runs the first and the last chunk, both on the edge: the head takes samples, the tail ends in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.chunk_outputs import Outputs, as_tensors, has_kept, merge_tensors, split_tensors
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
    """Runs on the sample itself; it receives nothing."""

    def forward(
        self, step: StepState, microbatch: int, received: Sequence[torch.Tensor], specs: HopSpecs
    ) -> Outputs:
        outputs = as_tensors(self.call(step, microbatch, step.microbatches[microbatch].args), self.index)
        self.losses.give(step, microbatch, self._anchor.device)
        return outputs


class TailRunner(ChunkRunner):
    """Passes its output to the loss, or keeps it. Its backward starts at the loss.

    The parameters of ``loss_module`` are trained with the tail's own.
    """

    loss_module: nn.Module | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters()
        if self.loss_module is not None:
            yield from self.loss_module.named_parameters("loss_fn")

    def forward(
        self, step: StepState, microbatch: int, received: Sequence[torch.Tensor], specs: HopSpecs
    ) -> Outputs:
        output = self.run(step, microbatch, received, specs)
        if has_kept(output):
            raise LdtError(
                f"chunk {self.index} keeps a tensor (ldt.keep), but it is the last chunk: no later one takes it. "
                "Return the tensor itself"
            )
        del received  # before the loss: from here on only the graph keeps inputs alive
        target = step.microbatches[microbatch].target
        if step.loss is not None and (target is not None or step.plan.training):
            self._finish(step, microbatch, output, target)
        self.losses.give(step, microbatch, self._anchor.device)
        if step.keep_outputs:
            rest, tensors = split_tensors(output)
            del output
            tensors = [tensor.detach() for tensor in tensors]
            own_memory(tensors)  # the module may keep these tensors and write to them in its next forward
            step.outputs[microbatch] = merge_tensors(rest, tensors)
        return Outputs()

    def starts(self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]) -> list[Start]:
        assert step.loss is not None
        self.losses.take_seed(step, microbatch, grads, ())
        loss = step.loss.take_root(microbatch)
        return [(loss, torch.ones_like(loss))] if loss.requires_grad else []

    def _finish(self, step: StepState, microbatch: int, output: Any, target: Any) -> None:
        assert step.loss is not None
        with self.losses.recording(microbatch):
            loss = step.loss.forward(microbatch, output, target)
        step.nan_check.loss(self.index, microbatch, loss)
        if step.guard is not None:
            step.guard.add_loss(microbatch, loss)
        if step.token_scale is not None and step.loss.complete:
            step.token_scale.broadcast(step.loss.count)


def make_runner(
    mesh: Mesh,
    index: int,
    module: nn.Module,
    free_outputs: bool,
    loss_module: nn.Module | None = None,
    aliasing: Aliasing | None = None,
) -> ChunkRunner:
    """Return the runner for chunk ``index``. Nothing else depends on where in the model a chunk is."""
    kind = {0: HeadRunner, mesh.topology.tail: TailRunner}.get(index, ChunkRunner)
    shared = mesh.topology.served > 1 and not mesh.is_edge
    sync = GradientSync(module, divisor=mesh.topology.edge_dp if shared else None)
    runner = kind(index, module, free_outputs, mesh.shards, sync, aliasing)
    if isinstance(runner, TailRunner):
        runner.loss_module = loss_module
    return runner
