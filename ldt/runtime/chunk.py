"""Runs one chunk: forward and backward of a microbatch, keeping its graph in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ldt.runtime.disclosure import InputTypeError
from ldt.runtime.specs import HopSpecs, TensorSpec
from ldt.runtime.work import StepWork

__all__ = ["ChunkRunner", "as_tensors", "refuse_wrappers"]

Root = Union[torch.Tensor, GradientEdge]  # noqa: UP007 (evaluated): where a backward starts


def as_tensors(output: Any, chunk: int) -> tuple[torch.Tensor, ...]:
    """A chunk's output as a tuple. Raises TypeError if it is not a tensor or a tuple of tensors."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(tensor, torch.Tensor) for tensor in output):
        return tuple(output)
    kind = type(output).__name__
    if isinstance(output, (tuple, list)):
        kinds = ["Tensor" if isinstance(entry, torch.Tensor) else type(entry).__name__ for entry in output]
        kind += f" of {', '.join(kinds)}"
    raise InputTypeError(f"chunk {chunk} must return a tensor or a tuple of tensors, got {kind}")


def refuse_wrappers(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise TypeError if one of ``tensors``, which are to be sent, only wraps others: a lane sends its own memory."""
    for index, tensor in enumerate(tensors):
        if is_traceable_wrapper_subclass(tensor):
            raise InputTypeError(
                f"{what}, tensor {index}, is a {type(tensor).__name__}, which cannot be sent to another node: make it "
                "a plain tensor, a DTensor with to_local() or full_tensor(), the result of an asynchronous collective "
                "with output * 1.0"
            )


@dataclass
class _Graph:
    """What a forward leaves for its backward: the roots, and the gradients of what came in, once they are there."""

    roots: list[Root | None]
    input_specs: HopSpecs = ()
    input_grads: list[torch.Tensor | None] = field(default_factory=list)


class _Entrance(torch.autograd.Function):
    """Where received tensors enter the graph, and their gradients leave it.

    The chunk gets tensors that are no leaves, so that it may modify them in place, as it may in the unsplit model.
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


_enter: Callable[..., tuple[torch.Tensor, ...]] = _Entrance.apply


class ChunkRunner:
    """Forward and backward of one chunk for any number of microbatches in flight.

    With ``free_outputs`` only the graph of an output is kept after the forward, not its memory: whoever takes the
    returned tensors decides how long they live.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device, free_outputs: bool) -> None:
        self.index = index
        self.module = module
        self._device = device
        self._free_outputs = free_outputs
        self._graphs: dict[int, _Graph] = {}
        self._anchor = torch.empty(0, requires_grad=True)

    def forward(
        self, work: StepWork, microbatch: int, arrived: Sequence[torch.Tensor], specs: HopSpecs
    ) -> tuple[torch.Tensor, ...]:
        """Run under the caller's grad mode on what ``arrived`` over a hop that carries ``specs``.

        Returns what goes on to the next chunk, to be given to ``leave``.
        """
        return as_tensors(self.module(*self.enter(microbatch, arrived, specs)), self.index)

    def backward(
        self, work: StepWork, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Accumulate parameter gradients, given one gradient per output (None: none).

        Returns the gradients of those inputs whose spec says so, zeros where the chunk did not use the input.
        """
        return self.backward_from(microbatch, self._graphs[microbatch].roots, grads)

    # -- parts of these ----------------------------------------------------------------------------------------

    def enter(self, microbatch: int, tensors: Sequence[torch.Tensor], specs: HopSpecs) -> list[torch.Tensor]:
        """The tensors to run on, for tensors that came over a hop that carries ``specs``."""
        if not (torch.is_grad_enabled() and any(spec.requires_grad for spec in specs)):
            return list(tensors)
        graph = _Graph([], specs)
        self._graphs[microbatch] = graph
        return list(_enter(graph, self._anchor, *tensors))

    def leave(self, microbatch: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the graph of ``outputs`` for the backward. Returns what goes to the next chunk: no graph hangs on it.

        A tensor that the module keeps is copied: the next forward may change it while this one is still under way.
        """
        if torch.is_grad_enabled():
            graph = self._graphs.setdefault(microbatch, _Graph([]))
            graph.roots = [self._root_of(output) for output in outputs]
        return self._apart(outputs)

    def backward_from(
        self, microbatch: int, roots: Sequence[Root | None], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """``backward``, starting at ``roots`` with ``grads``."""
        graph = self._graphs.pop(microbatch)
        pairs = [
            (root, grad)
            for root, grad in zip(roots, grads, strict=True)
            if root is not None and grad is not None
        ]
        graph.roots = []
        if pairs:
            starts: Any = [root for root, _ in pairs]  # torch's annotation allows tensors or edges, not both
            torch.autograd.backward(starts, [grad for _, grad in pairs])
        found = graph.input_grads or [None] * len(graph.input_specs)
        return [
            self._zeros(spec) if grad is None else _finished(grad)
            for spec, grad in zip(graph.input_specs, found, strict=True)
            if spec.requires_grad
        ]

    @property
    def in_flight(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Let go of all graphs, after a failure. A graph and its entrance hold each other until one lets go."""
        for graph in self._graphs.values():
            graph.roots = []
        self._graphs.clear()

    def _apart(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        detached = [output.detach() for output in outputs]
        if all(output.grad_fn is not None for output in outputs):
            return detached  # each was computed just now
        kept = _storages_kept_by(self.module)
        return [tensor.clone() if _storage(tensor) in kept else tensor for tensor in detached]

    def _root_of(self, output: torch.Tensor) -> Root | None:
        if not output.requires_grad:
            return None
        return get_gradient_edge(output) if self._free_outputs else output

    def _zeros(self, spec: TensorSpec) -> torch.Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages_kept_by(module: nn.Module) -> set[int]:
    """Where the buffers, and the tensors that are plain attributes, of ``module`` and its parts lie."""
    parts = [values for part in module.modules() for values in (part._buffers, part.__dict__)]
    kept = [value for values in parts for value in values.values() if type(value) is torch.Tensor]
    return {
        _storage(tensor) for tensor in kept if tensor.layout is torch.strided
    }  # a hop carries no other ones


def _finished(grad: torch.Tensor) -> torch.Tensor:
    """The backward of a layer that is spread over ranks may end in a collective that nobody has waited for."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
