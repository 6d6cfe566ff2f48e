"""Carries the auxiliary losses of a chunk's microbatches to the edge, and what scales their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.graph import GradientEdge

from ldt.errors import LdtError
from ldt.runtime.common.auxiliary_loss import LOSSES_DTYPE, LossRecord, carried_names
from ldt.runtime.common.kept import sent_specs
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.step_state import StepState

__all__ = ["CarriedLosses", "combined"]

_Tensors = Sequence[torch.Tensor]
_Grad = torch.Tensor | None
_Root = GradientEdge | None


class CarriedLosses:
    """Those of one chunk. On the edge they end: ``StepState.auxiliary`` gets the values."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._records: dict[int, LossRecord] = {}
        self._received: dict[int, torch.Tensor] = {}

    def take(self, step: StepState, microbatch: int, received: _Tensors) -> _Tensors:
        """Return what the chunk gets of ``received``."""
        place = self._place(step, microbatch, self._chunk - 1)
        if place is None:
            return received
        self._received[microbatch] = received[place]
        return [*received[:place], *received[place + 1 :]]

    def own_specs(self, step: StepState, microbatch: int, specs: HopSpecs) -> HopSpecs:
        """Return the specs of what the chunk gets of inputs with ``specs``."""
        place = self._place(step, microbatch, self._chunk - 1)
        return specs if place is None else (*specs[:place], *specs[place + 1 :])

    def recording(self, microbatch: int) -> AbstractContextManager[object]:
        """A context for the parts of a forward: the chunk, and behind the last one the loss function."""
        return self._records.setdefault(microbatch, LossRecord()).recording()

    def give(self, step: StepState, microbatch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return what is sent behind the chunk's outputs; on the edge nothing.

        Raises LdtError for a loss that the dry run did not have.
        """
        values = dict(self._records[microbatch].values)
        if not (values and torch.is_grad_enabled()):
            del self._records[microbatch]
        for index, name in enumerate(self._names(step, microbatch, self._chunk - 1)):
            before = self._received[microbatch][index]
            values[name] = values[name] + before if name in values else before
        self._received.pop(microbatch, None)
        for name, value in values.items():
            step.nan_check.auxiliary(self._chunk, microbatch, name, value)
        if step.on_edge:
            for name, value in values.items():
                found = step.auxiliary.setdefault(name, {})
                found[microbatch] = found[microbatch] + value if microbatch in found else value
            return ()
        names = self._names(step, microbatch, self._chunk)
        if unknown := sorted(values.keys() - {*names}):
            raise LdtError(
                f"chunk {self._chunk} added the auxiliary loss {unknown[0]!r} for microbatch {microbatch}, which its "
                "dry run did not: add it for all microbatches, a zero where there is none; a module with an "
                f"output_spec must name it, auxiliary_losses = ({unknown[0]!r},)"
            )
        if not names:
            return ()
        zero = torch.zeros((), dtype=LOSSES_DTYPE, device=device)
        carried = torch.stack([values[name].to(device) if name in values else zero for name in names])
        return (carried.requires_grad_(torch.is_grad_enabled()),)

    def take_seed(
        self, step: StepState, microbatch: int, grads: Sequence[_Grad], roots: Sequence[_Root]
    ) -> tuple[Sequence[_Grad], Sequence[_Root]]:
        """Set what scales the losses of the chunk. Returns the gradients of its own outputs, and their ``roots``."""
        place = self._place(step, microbatch, self._chunk)
        if place is not None:
            seed = grads[place]
            assert seed is not None, "a seed is always sent"
            self._set_seed(microbatch, seed[:1].reshape(()))
            return [*grads[:place], *grads[place + 1 :]], [*roots[:place], *roots[place + 1 :]]
        if step.on_edge and self._is_concerned(step, microbatch):
            assert step.loss is not None
            self._set_seed(microbatch, step.loss.seed(microbatch))
        return grads, roots

    def pass_back(
        self, step: StepState, microbatch: int, grads: list[torch.Tensor | None], specs: HopSpecs
    ) -> list[torch.Tensor | None]:
        """Return the gradients of all inputs, given ``grads`` of the chunk's own, which have ``specs``."""
        names = self._names(step, microbatch, self._chunk - 1)
        if not names:
            return grads
        seed = self._records[microbatch].seed
        assert seed is not None
        place = sum(spec.requires_grad for spec in sent_specs(specs))
        return [*grads[:place], seed.expand(len(names)).contiguous(), *grads[place:]]

    def repeating(self, microbatch: int) -> AbstractContextManager[object]:
        """A context for the parts of a backward."""
        record = self._records.get(microbatch)
        return nullcontext() if record is None else record.repeating()

    def end(self, microbatch: int) -> None:
        """Called after the backward. Raises LdtError if a loss got no gradient."""
        if (record := self._records.pop(microbatch, None)) is not None:
            record.check_complete(self._chunk)

    def drop(self) -> None:
        """Release everything after a failure."""
        self._records.clear()
        self._received.clear()

    def _is_concerned(self, step: StepState, microbatch: int) -> bool:
        return microbatch in self._records or bool(self._names(step, microbatch, self._chunk - 1))

    def _set_seed(self, microbatch: int, seed: torch.Tensor) -> None:
        self._records.setdefault(microbatch, LossRecord()).seed = seed

    @classmethod
    def _place(cls, step: StepState, microbatch: int, hop: int) -> int | None:
        """The place of the tensor of losses among what ``hop`` carries: the last."""
        if not cls._names(step, microbatch, hop):
            return None
        return len(sent_specs(step.hops[microbatch][hop])) - 1

    @staticmethod
    def _names(step: StepState, microbatch: int, hop: int) -> tuple[str, ...]:
        hops = step.hops[microbatch] if step.hops else ()
        return carried_names(hops[hop]) if 0 <= hop < len(hops) else ()


def combined(
    values: Mapping[str, Mapping[int, torch.Tensor]], weights: Mapping[int, float] | None, number: int
) -> dict[str, torch.Tensor]:
    """The losses of a step by name: means with ``weights`` over ``number`` microbatches; without, their sums.

    If no microbatch has a weight, as in an eval without targets, all have the same.
    """
    if weights is not None and not any(weights.values()):
        weights = dict.fromkeys(range(number), 1.0)
    found = {}
    for name, of_microbatch in values.items():
        parts = [
            value if weights is None else value * weights.get(microbatch, 0.0)
            for microbatch, value in of_microbatch.items()
        ]
        total = torch.stack(parts).sum()
        found[name] = total if weights is None else total / sum(weights.values())
    return found
