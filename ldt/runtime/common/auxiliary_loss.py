"""Auxiliary losses: ``add_loss`` in a chunk, and the record of those of one forward.

The value of each loss travels with what the chunk sends, in one tensor behind it, to the next chunk on the edge.
What its gradient is scaled by comes back with their gradients, so it is scaled like the loss of the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec

__all__ = [
    "LOSSES_DTYPE",
    "LossRecord",
    "add_loss",
    "carried_names",
    "declared_losses",
    "losses_spec",
    "without_losses",
]

LOSSES_DTYPE = torch.float64  # is never compressed, and holds a token count exactly
_MAX_NAME = 100
# One chunk of a process runs at a time, on whichever threads its backward uses.
_active: list[LossRecord] = []


def add_loss(tensor: torch.Tensor, loss: torch.Tensor, name: str, weight: float = 1.0) -> torch.Tensor:
    """Add ``weight * loss`` to what a step minimizes, from any chunk on any stage. Returns ``tensor``: use it instead.

    The gradient of the loss is computed together with that of the returned tensor, which must reach the output of the
    chunk. It is scaled as the loss of the microbatch is: for ``loss_reduction="mean"`` the step minimizes the mean over
    microbatches of ``loss_fn`` plus all weighted losses, for "sum" their sum, for "token" the mean over tokens, in
    which a microbatch counts with its number of tokens, for "root" the sum of the roots and of these losses. A
    ``grad_scaler`` scales them as well. ``StepResult.auxiliary`` has the values, without their weights, on the edge;
    ``StepResult.loss`` does not contain them. Losses of one name add up. In an eval they are only reported.

    Outside a pipeline the gradient is that of ``weight * loss``. With M microbatches per step, where each loss is
    divided by M, that is M times what a pipeline adds.

    Args:
        tensor: Any tensor on the way to the output of the chunk, such as its hidden states.
        loss: A scalar, computed from what the chunk has: its inputs, parameters and buffers. Equal on all ranks of a
            node.
        name: Names it in ``StepResult.auxiliary``. A chunk must add the same names for all microbatches of one shape:
            where there is none, add a zero.
        weight: A number.

    Raises:
        TypeError: ``tensor`` or ``loss`` is no tensor, or ``name`` no string.
        ValueError: ``loss`` is not a real scalar, or ``name`` is empty or longer than 100 characters.
        LdtError: Raised by the step: the dry run of the chunk had no loss of this name, or the returned tensor was not
            used.
    """
    for what, value in (("tensor", tensor), ("loss", loss)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"add_loss needs a {what} that is a torch.Tensor, got {type(value).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"add_loss needs a name that is a str, got {type(name).__name__}")
    if not 0 < len(name) <= _MAX_NAME:
        raise ValueError(f"add_loss needs a name of 1 to {_MAX_NAME} characters, got {len(name)}")
    if loss.numel() != 1 or loss.is_complex():
        raise ValueError(
            f"add_loss needs a real scalar loss, got {loss.dtype} of shape {list(loss.shape)} as {name!r}"
        )
    added: torch.Tensor = _add(tensor, loss, name, float(weight))
    return added


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add(tensor: torch.Tensor, loss: torch.Tensor, name: str, weight: float) -> torch.Tensor:
    record = _active[-1] if _active else None
    if record is not None:
        record.add(name, loss)
    added: torch.Tensor = _AddLoss.apply(tensor, loss, weight, record)  # type: ignore[no-untyped-call]
    return added


class _AddLoss(torch.autograd.Function):
    """Returns its first argument. Its backward also starts the one of the loss."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, weight: float, record: LossRecord | None
    ) -> torch.Tensor:
        ctx.record, ctx.weight = record, weight
        ctx.like = loss.new_empty(0), loss.shape
        if record is not None and ctx.needs_input_grad[1]:
            record.has_gradient()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        empty, shape = ctx.like
        seed: Any = 1.0 if ctx.record is None else ctx.record.take_seed()
        of_loss = (torch.as_tensor(seed, device=empty.device) * ctx.weight).to(empty.dtype).expand(shape)
        return grad, of_loss, None, None


class LossRecord:
    """The auxiliary losses of one forward of a chunk, by name, and the ``seed`` that scales their gradients."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.seed: torch.Tensor | None = None
        self._counts = False
        self._to_come = 0  # losses whose gradient has not been computed

    def add(self, name: str, loss: torch.Tensor) -> None:
        """Called by ``add_loss``. A forward that a checkpoint repeats adds nothing."""
        if self._counts:
            value = loss.detach().reshape(()).to(LOSSES_DTYPE)
            self.values[name] = self.values[name] + value if name in self.values else value

    def has_gradient(self) -> None:
        self._to_come += self._counts

    def take_seed(self) -> torch.Tensor:
        assert self.seed is not None, "the runtime sets it before the backward"
        self._to_come -= 1
        return self.seed

    def recording(self) -> AbstractContextManager[object]:
        """Losses that are added within are those of this record."""
        return _Activated(self, counts=True)

    def repeating(self) -> AbstractContextManager[object]:
        """Losses of forwards that a checkpoint repeats within are scaled by the seed."""
        return _Activated(self, counts=False)

    def check_complete(self, chunk: int) -> None:
        """Raise LdtError if a loss got no gradient in the backward that has ended."""
        if self._to_come > 0:
            raise LdtError(
                f"chunk {chunk} added auxiliary losses ({', '.join(self.values)}) without a gradient for one of them: "
                "the tensor that add_loss returns must reach the output of the chunk, in place of the one it was given"
            )


class _Activated:
    """Not made by ``contextlib.contextmanager``, which changes an exception that passes through."""

    def __init__(self, record: LossRecord, counts: bool) -> None:
        self._record, self._counts = record, counts

    def __enter__(self) -> None:
        self._record._counts = self._counts
        _active.append(self._record)

    def __exit__(self, *unused: object) -> None:
        self._record._counts = False
        _active.pop()


# -- the tensor that travels ---------------------------------------------------------------------------------------


def declared_losses(module: Any) -> tuple[str, ...]:
    """The names of a module that declares its outputs, and so needs no dry run: its attribute ``auxiliary_losses``."""
    return tuple(getattr(module, "auxiliary_losses", ()))


def losses_spec(names: Sequence[str], training: bool) -> HopSpecs:
    """The spec of the tensor with the losses of these names; none without names."""
    if not names:
        return ()
    return (TensorSpec((len(names),), LOSSES_DTYPE, requires_grad=training, auxiliary=tuple(names)),)


def carried_names(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """The names of the losses that a hop of ``specs`` carries."""
    return next((spec.auxiliary for spec in specs if spec.auxiliary), ())


def without_losses(specs: HopSpecs) -> HopSpecs:
    """The specs of what chunks return themselves."""
    return tuple(spec for spec in specs if not spec.auxiliary)
