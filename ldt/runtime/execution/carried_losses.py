"""Carries the auxiliary losses of a chunk's microbatches to the edge, and what scales their gradients back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ldt.errors import LdtError
from ldt.runtime.common.auxiliary_loss import LOSSES_DTYPE, LossRecord, carried_names
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.step_state import StepState

__all__ = ["CarriedLosses", "combined"]

_Tensors = Sequence[torch.Tensor]


class CarriedLosses:
    """Those of one chunk. On the edge they end: ``StepState.auxiliary`` gets the values."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._records: dict[int, LossRecord] = {}
        self._received: dict[int, torch.Tensor] = {}

    def take(self, step: StepState, microbatch: int, received: _Tensors) -> _Tensors:
        """Return what the chunk gets of ``received``."""
        if not self._names(step, microbatch, self._chunk - 1):
            return received
        self._received[microbatch] = received[-1]
        return received[:-1]

    def own_specs(self, step: StepState, microbatch: int, specs: HopSpecs) -> HopSpecs:
        """Return the specs of what the chunk gets of a hop of ``specs``."""
        return specs[:-1] if self._names(step, microbatch, self._chunk - 1) else specs

    @contextmanager
    def recording(self, microbatch: int) -> Iterator[None]:
        """Run the forward of the chunk within."""
        record = LossRecord()
        with record.recording():
            yield
        if record.values:
            self._records[microbatch] = record

    def give(self, step: StepState, microbatch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return what is sent behind the chunk's outputs; on the edge nothing.

        Raises LdtError for a loss that the dry run did not have.
        """
        record = self._records.get(microbatch)
        values = {} if record is None else dict(record.values)
        for index, name in enumerate(self._names(step, microbatch, self._chunk - 1)):
            before = self._received[microbatch][index]
            values[name] = values[name] + before if name in values else before
        self._received.pop(microbatch, None)
        if not torch.is_grad_enabled():
            self._records.pop(microbatch, None)
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
        self, step: StepState, microbatch: int, grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Set what scales the losses of the chunk. Returns the gradients of its own outputs."""
        names = self._names(step, microbatch, self._chunk)
        if names:
            *grads, seed = grads
            assert seed is not None, "a seed is always sent"
            self._set_seed(microbatch, seed[:1].reshape(()))
        elif step.on_edge and self._is_concerned(step, microbatch):
            assert step.loss is not None
            self._set_seed(microbatch, step.loss.seed(microbatch))
        return grads

    def pass_back(self, step: StepState, microbatch: int) -> list[torch.Tensor | None]:
        """The gradient of the tensor that was received behind the inputs, if one was."""
        names = self._names(step, microbatch, self._chunk - 1)
        if not names:
            return []
        seed = self._records[microbatch].seed
        assert seed is not None
        return [seed.expand(len(names)).contiguous()]

    @contextmanager
    def repeating(self, microbatch: int) -> Iterator[None]:
        """Run a part of the backward within."""
        record = self._records.get(microbatch)
        if record is None:
            yield
            return
        with record.repeating():
            yield

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
