"""Runs one chunk: forward and backward of a microbatch, keeping its graph in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ldt.errors import LdtError
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.common.chunk_outputs import as_tensors
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.aliasing import Aliasing, passed_on
from ldt.runtime.execution.side_effects import FunctionWatch
from ldt.runtime.execution.split_backward import Start, WeightPart, backward_input
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.model.data_parallel import GradientSync
from ldt.runtime.model.keywords import declares, keywords_of

__all__ = ["ChunkRunner"]


@dataclass
class _InFlight:
    """What a forward leaves for its backward: the roots, and the gradients of what came in, once they are there."""

    roots: list[GradientEdge | None]
    input_specs: HopSpecs = ()
    input_edges: list[GradientEdge] = field(default_factory=list)  # of those that require a gradient
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    weight_part: WeightPart | None = None  # of a backward that is split, once its first part was run
    outputs: list[torch.Tensor] = field(default_factory=list)  # where they are not freed

    def let_go(self) -> None:
        """Of the graph: it and its entrance hold each other until one lets go."""
        self.roots, self.input_edges, self.weight_part, self.outputs = [], [], None, []


class _Entrance(torch.autograd.Function):
    """Where received tensors enter the graph, and their gradients leave it.

    The chunk gets tensors that are no leaves, so that it may modify them in place, as it may in the unsplit model.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: _InFlight, anchor: torch.Tensor, *tensors: torch.Tensor
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


_enter: Callable[..., tuple[torch.Tensor, ...]] = _Entrance.apply


class ChunkRunner:
    """Forward and backward of one chunk for any number of microbatches in flight.

    With ``free_outputs`` only the graph of an output is kept after the forward, not its memory: whoever takes the
    returned tensors decides how long they live. What arrives and leaves are this rank's ``shards`` of tensors that are
    split over its node.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
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
        self._graphs: dict[int, _InFlight] = {}
        self._watch = FunctionWatch(module)
        self._anchor = torch.empty(0, requires_grad=True)

    def forward(
        self, step: StepState, microbatch: int, arrived: Sequence[torch.Tensor], specs: HopSpecs
    ) -> tuple[torch.Tensor, ...]:
        """Run under the caller's grad mode on what ``arrived`` over a hop that carries ``specs``.

        Returns what goes on to the next chunk, to be given to ``leave``.
        """
        return as_tensors(self.run(step, microbatch, arrived, specs), self.index)

    def backward(
        self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Accumulate parameter gradients, given one gradient per output (None: none).

        Returns the gradients of those inputs whose spec says so, None where the chunk did not use the input.
        """
        starts = self.starts(step, microbatch, grads)
        graph = self._graphs.pop(microbatch)
        graph.let_go()
        _backward(starts)
        found = graph.input_grads or [None] * len(graph.input_specs)
        wanted = [grad for spec, grad in zip(graph.input_specs, found, strict=True) if spec.requires_grad]
        given = list(map(_finished, wanted))
        step.nan_check.gradients(self.index, microbatch, given, self.named_parameters())
        return given

    def backward_input(
        self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The part of ``backward`` that others wait for: only the gradients of the inputs.

        Raises LdtError if the backward of this chunk cannot be split.
        """
        graph = self._graphs[microbatch]
        starts = self.starts(step, microbatch, grads)
        with self._named():
            found, graph.weight_part = backward_input(starts, graph.input_edges, self._watch)
        graph.roots, graph.outputs = [], []
        given = list(map(_finished, found))
        step.nan_check.gradients(self.index, microbatch, given)
        return given

    def backward_weight(self, step: StepState, microbatch: int) -> None:
        """The rest: accumulate parameter gradients. Raises LdtError if something else is changed in both parts."""
        graph = self._graphs.pop(microbatch)
        assert graph.weight_part is not None
        try:
            with self._named():
                graph.weight_part.run()
        finally:
            graph.let_go()
        step.nan_check.gradients(self.index, microbatch, parameters=self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What its backward trains."""
        return self.module.named_parameters()

    # -- parts of these ----------------------------------------------------------------------------------------

    def run(self, step: StepState, microbatch: int, arrived: Sequence[torch.Tensor], specs: HopSpecs) -> Any:
        """The module on what ``arrived``. Raises LdtError if it changes in place what is more than that elsewhere."""
        inputs = self.enter(microbatch, arrived, specs)
        del arrived
        versions = [tensor._version for tensor in inputs]
        output = self.call(step, microbatch, inputs)
        if self.aliasing is not None:
            pairs = enumerate(zip(inputs, versions, strict=True))
            changed = [place for place, (tensor, version) in pairs if tensor._version != version]
            self.aliasing.changes(self.index - 1, changed)
            self.aliasing.passes(self.index - 1, passed_on(inputs, output))
        return output

    def call(self, step: StepState, microbatch: int, inputs: Sequence[Any]) -> Any:
        """The module on ``inputs``, and on what it takes by name of what there is for this microbatch."""
        output = self.module(*inputs, **self._keywords.pick(step.keywords[microbatch], len(inputs)))
        step.nan_check.outputs(self.index, microbatch, output)
        return output

    def enter(self, microbatch: int, tensors: Sequence[torch.Tensor], specs: HopSpecs) -> list[torch.Tensor]:
        """The tensors to run on, for tensors that came over a hop that carries ``specs``."""
        if not (torch.is_grad_enabled() and any(spec.requires_grad for spec in specs)):
            return self._whole(tensors, specs)
        graph = _InFlight([], specs)
        self._graphs[microbatch] = graph
        inputs = _enter(graph, self._anchor, *tensors)
        graph.input_edges = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
        return self._whole(inputs, specs)

    def leave(self, microbatch: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the graph of ``outputs`` for the backward. Returns what goes to the next chunk: no graph hangs on it.

        It is in the memory of the outputs: see ``in_flight`` for who else may have that.
        """
        leaving = [output.detach() for output in outputs]
        if torch.is_grad_enabled():
            graph = self._graphs.setdefault(microbatch, _InFlight([]))
            graph.roots = [get_gradient_edge(o) if o.requires_grad else None for o in outputs]
            graph.outputs = [] if self._free_outputs else list(leaving)
        return leaving

    def starts(self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]) -> list[Start]:
        """Where the backward begins, and with what."""
        pairs = zip(self._graphs[microbatch].roots, grads, strict=True)
        return [(root, grad) for root, grad in pairs if root is not None and grad is not None]

    @property
    def in_flight(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Let go of all graphs, after a failure."""
        for graph in self._graphs.values():
            graph.let_go()
        self._graphs.clear()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except LdtError as error:
            if type(error) is not LdtError:  # a hook's own
                raise
            raise LdtError(f"chunk {self.index} ({type(self.module).__name__}): {error}") from None

    def _whole(self, parts: Sequence[torch.Tensor], specs: HopSpecs) -> list[torch.Tensor]:
        return [self._shards.whole(part, spec) for part, spec in zip(parts, specs, strict=True)]


def _backward(starts: Sequence[Start]) -> None:
    if starts:
        roots: Any = [root for root, _ in starts]  # torch's annotation allows tensors or edges, not both
        torch.autograd.backward(roots, [grad for _, grad in starts])


def _finished(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The backward of a layer that is spread over ranks may end in a collective that nobody has waited for."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
