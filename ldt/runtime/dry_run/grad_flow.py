"""Predicts which gradients come back over a hop, from the autograd graph of a dry run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from ldt.runtime.common.autograd_graph import REENTRANT_CHECKPOINT, accumulate_grad_nodes, name_of, reachable
from ldt.runtime.common.tensor_spec import HopSpecs

__all__ = ["DryRun", "InferredOutputs", "Reach", "of_loss", "unknown", "used"]


class Reach(NamedTuple):
    """The inputs of a chunk, by number, that get a gradient from one output: surely (``sure``) or possibly (``maybe``).

    ``only`` are the inputs through which alone the output requires a gradient: no parameter contributes to it.
    """

    sure: tuple[int, ...] = ()
    maybe: tuple[int, ...] = ()
    only: tuple[int, ...] = ()


class InferredOutputs(NamedTuple):
    """The output specs of a chunk for some inputs, and for each output the inputs that its gradient reaches.

    ``reentrant`` are the inputs on which alone a reentrant checkpoint depends: it trains its layers only if one of
    them requires a gradient. ``losses`` are the names of the auxiliary losses that the chunk adds.
    """

    specs: HopSpecs
    reaches: tuple[Reach, ...] = ()
    reentrant: tuple[int, ...] = ()
    losses: tuple[str, ...] = ()

    def with_grads_of(self, step: InferredOutputs) -> InferredOutputs:
        """These outputs, of an eval, marked where a ``step`` has an equal tensor that requires a gradient."""
        found = []
        for spec, other in zip(self.specs, step.specs, strict=False):
            equal = (spec.shape, spec.dtype, spec.shard) == (other.shape, other.dtype, other.shard)
            found.append(replace(spec, requires_grad=equal and other.requires_grad))
        return self._replace(specs=(*found, *self.specs[len(found) :]))

    def to_json(self) -> list[Any]:
        return [[spec.to_json() for spec in self.specs], self.reaches, self.reentrant, self.losses]


@dataclass(frozen=True)
class DryRun:
    """The autograd graph of a run on fake tensors.

    ``inputs`` has the graph nodes of the inputs that require a gradient, by number. ``state_changed`` says that the
    code used a random generator of the host or changed Python state, so another run may take other branches.
    ``hooks_skipped`` says that hooks did not run, which may change what requires a gradient.
    """

    output: Any
    inputs: Mapping[int, Node]
    parameters: Sequence[torch.Tensor]  # that require a gradient
    state_changed: bool
    hooks_skipped: bool
    losses: tuple[str, ...] = ()  # names of auxiliary losses

    def may_require_grad(self, outputs: Sequence[torch.Tensor]) -> list[bool]:
        """Return which of ``outputs`` may require a gradient, in this run or in one that takes other branches."""
        trains = self.state_changed and bool(self.parameters or self.inputs)
        possible = [
            (self.hooks_skipped or trains) and (o.is_floating_point() or o.is_complex()) for o in outputs
        ]
        return [o.requires_grad or also for o, also in zip(outputs, possible, strict=True)]

    def reaches(self, outputs: Sequence[torch.Tensor]) -> tuple[Reach, ...]:
        """Return the reach of each output's gradient."""
        whole = self._is_whole(outputs)
        found = []
        for output in outputs:
            nodes = _behind([output])
            sure = tuple(i for i, node in self.inputs.items() if node in nodes and not self.state_changed)
            maybe = () if whole else tuple(i for i in self.inputs if i not in sure)
            found.append(Reach(sure, maybe, self._only_by(output.grad_fn)))
        return tuple(found)

    def reentrant(self, outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the inputs on which alone reentrant checkpoints before ``outputs`` depend."""
        checkpoints = [node for node in _behind(outputs) if name_of(node).startswith(REENTRANT_CHECKPOINT)]
        return tuple(sorted({i for node in checkpoints for i in self._only_by(node)}))

    def _only_by(self, start: Node | None) -> tuple[int, ...]:
        """Return the inputs that a node depends on, none if it depends on parameters as well."""
        if start is None:
            return ()
        ends = set(self.inputs.values())
        if any(accumulate_grad_nodes([start], ends)):
            return ()
        nodes = set(reachable([start], ends))
        return tuple(i for i, node in self.inputs.items() if node in nodes)

    def _is_whole(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the run took all branches, as far as one can tell: it used every parameter."""
        leaves = [node.variable for node in accumulate_grad_nodes(_roots(outputs))]  # type: ignore[attr-defined]
        variables = {id(variable) for variable in (*leaves, *outputs)}
        return not self.state_changed and all(id(parameter) in variables for parameter in self.parameters)


def of_loss(run: DryRun, outputs: Sequence[torch.Tensor]) -> Reach:
    """Return the reach of the gradient of a loss that uses at least one of ``outputs``."""
    reaches = run.reaches(outputs or [torch.empty(0)])
    every = [i for i in run.inputs if reaches and all(i in reach.sure for reach in reaches)]
    some = [i for i in run.inputs if any(i in (*reach.sure, *reach.maybe) for reach in reaches)]
    return Reach(tuple(every), tuple(i for i in some if i not in every))


def unknown(inputs: HopSpecs) -> Reach:
    """Return the reach of an output of a chunk that cannot run on fake tensors: a single input is assumed reached."""
    numbers = tuple(i for i, spec in enumerate(inputs) if spec.requires_grad)
    return Reach(sure=numbers) if len(numbers) == 1 else Reach(maybe=numbers)


def used(
    inputs: HopSpecs, outputs: Sequence[bool | None], answer: InferredOutputs, decisive: Collection[int] = ()
) -> HopSpecs:
    """Return ``inputs`` of a chunk with their ``used`` and ``decisive`` set, given the use of its ``outputs``.

    ``decisive`` are the numbers of outputs on which alone a reentrant checkpoint of a later chunk depends.
    """
    reaches = answer.reaches
    sure = {i for reach, out in zip(reaches, outputs, strict=True) if out is True for i in reach.sure}
    maybe = {
        i
        for reach, out in zip(reaches, outputs, strict=True)
        if out is not False
        for i in (*reach.sure, *reach.maybe)
    }
    uses = [
        True if i in sure or not spec.requires_grad else None if i in maybe else False
        for i, spec in enumerate(inputs)
    ]
    deciding = {*answer.reentrant, *(i for number in decisive for i in reaches[number].only)}
    if not deciding and all(use is True for use in uses):
        return inputs
    return tuple(
        replace(spec, used=use, decisive=spec.requires_grad and i in deciding)
        for i, (spec, use) in enumerate(zip(inputs, uses, strict=True))
    )


def _behind(outputs: Sequence[torch.Tensor]) -> set[Node]:
    return set(reachable(_roots(outputs)))


def _roots(outputs: Sequence[torch.Tensor]) -> list[Node]:
    return [output.grad_fn for output in outputs if output.grad_fn is not None]
