"""Which gradients come back over a hop: what a chunk does with each tensor that it gets, asked of a dry run's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from ldt.runtime.common.autograd_graph import reachable
from ldt.runtime.common.tensor_spec import HopSpecs

__all__ = ["Answer", "DryRun", "Reach", "of_loss", "unknown", "used"]


class Reach(NamedTuple):
    """The inputs of a chunk, by number, that the gradient of one output gives one: surely, and perhaps.

    ``only`` are those by which alone the output requires a gradient, as no parameter lies behind it.
    """

    sure: tuple[int, ...] = ()
    maybe: tuple[int, ...] = ()
    only: tuple[int, ...] = ()


class Answer(NamedTuple):
    """What a chunk returns for some inputs, and for each of its outputs how far back the gradient goes.

    ``reentrant`` are the inputs by which alone a reentrant checkpoint trains its layers: it does if they require a
    gradient.
    """

    specs: HopSpecs
    reaches: tuple[Reach, ...] = ()
    reentrant: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        return [[spec.to_json() for spec in self.specs], self.reaches, self.reentrant]


@dataclass(frozen=True)
class DryRun:
    """The graph of a run on fake tensors. ``inputs`` has the nodes by which those that need a gradient entered it.

    ``moved`` says that the code asked a random generator of the host, or counted or noted something that it keeps, so
    that another run may go other ways.
    ``hooked`` that hooks were left out, which may change what requires a gradient.
    """

    output: Any
    inputs: Mapping[int, Node]
    parameters: Sequence[torch.Tensor]  # those that are trained
    moved: bool
    hooked: bool

    def may_require_grad(self, outputs: Sequence[torch.Tensor]) -> list[bool]:
        """Which of ``outputs`` may require a gradient, in this run or in one that goes other ways."""
        trains = self.moved and bool(self.parameters or self.inputs)
        possible = [(self.hooked or trains) and (o.is_floating_point() or o.is_complex()) for o in outputs]
        return [o.requires_grad or also for o, also in zip(outputs, possible, strict=True)]

    def reaches(self, outputs: Sequence[torch.Tensor]) -> tuple[Reach, ...]:
        """How far back the gradient of each of ``outputs`` goes."""
        whole = self._is_whole(outputs)
        found = []
        for output in outputs:
            nodes = _behind([output])
            sure = tuple(i for i, node in self.inputs.items() if node in nodes and not self.moved)
            maybe = () if whole else tuple(i for i in self.inputs if i not in sure)
            found.append(Reach(sure, maybe, self._only_by(output.grad_fn)))
        return tuple(found)

    def reentrant(self, outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The inputs by which alone reentrant checkpoints before ``outputs`` train their layers."""
        checkpoints = [node for node in _behind(outputs) if node.name().startswith("CheckpointFunction")]
        return tuple(sorted({i for node in checkpoints for i in self._only_by(node)}))

    def _only_by(self, start: Node | None) -> tuple[int, ...]:
        """The inputs that lie behind a node, none if parameters do as well."""
        if start is None:
            return ()
        nodes = set(reachable([start], set(self.inputs.values())))
        if any(node.name().endswith("AccumulateGrad") for node in nodes):
            return ()
        return tuple(i for i, node in self.inputs.items() if node in nodes)

    def _is_whole(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the run took all ways that there are, as far as one can tell: all parameters were used."""
        leaves = [getattr(node, "variable", None) for node in _behind(outputs)]
        variables = {id(variable) for variable in (*leaves, *outputs)}
        return not self.moved and all(id(parameter) in variables for parameter in self.parameters)


def of_loss(run: DryRun, outputs: Sequence[torch.Tensor]) -> Reach:
    """How far back the gradient of a loss goes that uses at least one of ``outputs``."""
    reaches = run.reaches(outputs or [torch.empty(0)])
    every = [i for i in run.inputs if reaches and all(i in reach.sure for reach in reaches)]
    some = [i for i in run.inputs if any(i in (*reach.sure, *reach.maybe) for reach in reaches)]
    return Reach(tuple(every), tuple(i for i in some if i not in every))


def unknown(inputs: HopSpecs) -> Reach:
    """Of an output of a chunk that cannot be run on fake tensors: of one input it is taken for granted."""
    numbers = tuple(i for i, spec in enumerate(inputs) if spec.requires_grad)
    return Reach(sure=numbers) if len(numbers) == 1 else Reach(maybe=numbers)


def used(
    inputs: HopSpecs, outputs: Sequence[bool | None], answer: Answer, decisive: Collection[int] = ()
) -> HopSpecs:
    """``inputs`` of a chunk with what is known of their use, given that of its ``outputs``.

    ``decisive`` are the numbers of outputs by which alone a checkpoint of a later chunk trains its layers.
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
    return tuple(
        replace(spec, used=use, decisive=spec.requires_grad and i in deciding)
        for i, (spec, use) in enumerate(zip(inputs, uses, strict=True))
    )


def _behind(outputs: Sequence[torch.Tensor]) -> set[Node]:
    return set(reachable([output.grad_fn for output in outputs if output.grad_fn is not None], set()))
