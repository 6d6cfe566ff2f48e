"""Runs the forward and the backward of one chunk and keeps the graph in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ldt._torch_private import AsyncCollectiveTensor
from ldt.errors import LdtError
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.common.chunk_outputs import Outputs, as_tensors
from ldt.runtime.common.output_marks import decode
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.aliasing import Aliasing, passthrough_outputs
from ldt.runtime.execution.carried_losses import CarriedLosses
from ldt.runtime.execution.delayed_weights import DelayedWeights
from ldt.runtime.execution.side_effects import FunctionWatch
from ldt.runtime.execution.split_backward import Start, WeightPart, backward_input
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.model.data_parallel import GradientSync
from ldt.runtime.model.keywords import declares, keywords_of

__all__ = ["ChunkRunner"]


@dataclass
class _Graph:
    """What a forward keeps for its backward: the roots and, once computed, the gradients of the inputs."""

    roots: list[GradientEdge | None]
    input_specs: HopSpecs = ()
    input_edges: list[GradientEdge] = field(default_factory=list)  # of the inputs that require a gradient
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    weight_part: WeightPart | None = None  # of a split backward, once its first part has run
    outputs: list[torch.Tensor] = field(default_factory=list)  # only with free_outputs=False

    def release(self) -> None:
        """Drop the graph, which forms a reference cycle with its _AttachInputs node."""
        self.roots, self.input_edges, self.weight_part, self.outputs = [], [], None, []


class _AttachInputs(torch.autograd.Function):
    """Attaches received tensors to the graph and captures their gradients.

    The chunk gets non-leaf tensors, which it may modify in place, as in the unsplit model.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: _Graph, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        inner = tuple(tensor.detach() for tensor in tensors)
        flags = [spec.requires_grad for spec in graph.input_specs]
        ctx.mark_non_differentiable(
            *(t for t, differentiable in zip(inner, flags, strict=True) if not differentiable)
        )
        return inner

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.graph.input_grads = list(grads)
        return (None,) * (2 + len(grads))


_attach: Callable[..., tuple[torch.Tensor, ...]] = _AttachInputs.apply


class ChunkRunner:
    """Runs the forward and the backward of one chunk for any number of microbatches at once.

    With ``free_outputs`` the runner keeps only the graph of an output after the forward, not its memory: the caller
    owns the returned tensors. Inputs and outputs are this rank's ``shards`` of tensors that are split over its node.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        free_outputs: bool,
        shards: NodeShards | None = None,
        sync: GradientSync | None = None,
        aliasing: Aliasing | None = None,
    ) -> None:
        self.index = index
        self.aliasing = aliasing
        self.sync = sync or GradientSync(module)
        self.module = module
        self._free_outputs = free_outputs
        self._shards = shards or NodeShards()
        self._keywords = keywords_of(module)
        self.declares = declares(module)
        self._graphs: dict[int, _Graph] = {}
        self._delayed = DelayedWeights(module)
        self._watch = FunctionWatch(module, once=bool(self._delayed))
        self.losses = CarriedLosses(index)
        self._anchor = torch.empty(0, requires_grad=True)

    def forward(
        self, step: StepState, microbatch: int, received: Sequence[torch.Tensor], specs: HopSpecs
    ) -> Outputs:
        """Run under the caller's grad mode on tensors ``received`` over its hop, or kept for it, with their ``specs``.

        Returns the outputs; pass them to ``detach_outputs``.
        """
        outputs = as_tensors(self.run(step, microbatch, received, specs), self.index)
        return outputs.with_last_sent(self.losses.give(step, microbatch, self._anchor.device))

    def backward(
        self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Accumulate parameter gradients, given one gradient per output (None if it has none).

        Returns the gradients of the inputs that require one, None where the chunk did not use the input.
        """
        starts = self.starts(step, microbatch, grads)
        graph = self._graphs.pop(microbatch)
        graph.release()
        with self.losses.repeating(microbatch):
            _backward(starts)
        self._delayed.run(microbatch)
        found = graph.input_grads or [None] * len(graph.input_specs)
        wanted = [grad for spec, grad in zip(graph.input_specs, found, strict=True) if spec.requires_grad]
        given = list(map(_waited, wanted))
        step.nan_check.gradients(self.index, microbatch, given, self.named_parameters())
        given = self.losses.pass_back(step, microbatch, given, graph.input_specs)
        self.losses.end(microbatch)
        return given

    def backward_input(
        self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Compute only the gradients of the inputs, which other ranks wait for.

        Raises LdtError if the backward of this chunk cannot be split.
        """
        graph = self._graphs[microbatch]
        starts = self.starts(step, microbatch, grads)
        with self._named(), self.losses.repeating(microbatch):
            found, graph.weight_part = backward_input(starts, graph.input_edges, self._watch)
        if graph.input_edges:  # otherwise all of the backward is in the second part
            self._delayed.collect(microbatch)
        graph.roots, graph.outputs = [], []
        given = list(map(_waited, found))
        step.nan_check.gradients(self.index, microbatch, given)
        return self.losses.pass_back(step, microbatch, given, graph.input_specs)

    def backward_weight(self, step: StepState, microbatch: int) -> None:
        """Accumulate the parameter gradients that ``backward_input`` left out.

        Raises LdtError if both parts change anything else.
        """
        graph = self._graphs.pop(microbatch)
        assert graph.weight_part is not None
        try:
            with self._named(), self.losses.repeating(microbatch):
                graph.weight_part.run()
            self._delayed.run(microbatch)
        finally:
            graph.release()
        self.losses.end(microbatch)
        step.nan_check.gradients(self.index, microbatch, parameters=self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that its backward trains."""
        return self.module.named_parameters()

    # -- building blocks ---------------------------------------------------------------------------------------

    def run(self, step: StepState, microbatch: int, received: Sequence[torch.Tensor], specs: HopSpecs) -> Any:
        """Run the module on ``received``.

        Raises LdtError if it changes an input in place whose memory is shared on the sending rank.
        """
        inputs = self.attach_inputs(
            microbatch,
            self.losses.take(step, microbatch, received),
            self.losses.own_specs(step, microbatch, specs),
        )
        del received
        versions = [tensor._version for tensor in inputs]
        output = self.call(step, microbatch, inputs)
        if self.aliasing is not None:
            arrived = sum(not spec.kept for spec in specs)
            pairs = enumerate(zip(inputs[:arrived], versions, strict=False))
            changed = [index for index, (tensor, version) in pairs if tensor._version != version]
            self.aliasing.changes(self.index - 1, changed)
            self.aliasing.passes(self.index - 1, passthrough_outputs(inputs[:arrived], output))
        return output

    def call(self, step: StepState, microbatch: int, inputs: Sequence[Any]) -> Any:
        """Call the module on ``inputs`` and on those keywords of the microbatch that it takes."""
        args, named = decode(inputs)
        named = self._keywords.pick(step.keywords[microbatch], len(args)) | named
        del inputs
        with self.losses.recording(microbatch):
            output = self.module(*args, **named)
        step.nan_check.outputs(self.index, microbatch, output)
        return output

    def attach_inputs(
        self, microbatch: int, tensors: Sequence[torch.Tensor], specs: HopSpecs
    ) -> list[torch.Tensor]:
        """Turn tensors received over a hop that carries ``specs`` into inputs of a new graph."""
        if not (torch.is_grad_enabled() and any(spec.requires_grad for spec in specs)):
            return self._whole(tensors, specs)
        graph = _Graph([], specs)
        self._graphs[microbatch] = graph
        inputs = _attach(graph, self._anchor, *tensors)
        graph.input_edges = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
        return self._whole(inputs, specs)

    def detach_outputs(self, microbatch: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the graph of ``outputs`` for the backward and return detached tensors for the next chunk.

        They share the memory of the outputs; ``own_memory`` says who else may refer to it.
        """
        detached = [output.detach() for output in outputs]
        if torch.is_grad_enabled():
            graph = self._graphs.setdefault(microbatch, _Graph([]))
            graph.roots = [get_gradient_edge(o) if o.requires_grad else None for o in outputs]
            graph.outputs = [] if self._free_outputs else list(detached)
        return detached

    def starts(self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]) -> list[Start]:
        """The edges that the backward starts from, each with its gradient."""
        grads, roots = self.losses.take_seed(step, microbatch, grads, self._graphs[microbatch].roots)
        pairs = zip(roots, grads, strict=True)
        return [(root, grad) for root, grad in pairs if root is not None and grad is not None]

    @property
    def num_graphs(self) -> int:
        """The number of forwards whose backward is still to come."""
        return len(self._graphs)

    def drop(self) -> None:
        """Release all graphs after a failure."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self.losses.drop()
        self._delayed.drop()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except LdtError as error:
            if type(error) is not LdtError:  # raised by a hook
                raise
            raise LdtError(f"chunk {self.index} ({type(self.module).__name__}): {error}") from None

    def _whole(self, parts: Sequence[torch.Tensor], specs: HopSpecs) -> list[torch.Tensor]:
        return [self._shards.whole(part, spec) for part, spec in zip(parts, specs, strict=True)]


def _backward(starts: Sequence[Start]) -> None:
    if starts:
        roots: Any = [root for root, _ in starts]  # torch's annotation allows tensors or edges, not both
        torch.autograd.backward(roots, [grad for _, grad in starts])


def _waited(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Wait for the collective that the backward of a sharded layer may end in."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
