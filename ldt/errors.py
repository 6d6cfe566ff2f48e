"""Exceptions of the package. They need neither torch nor the compiled module."""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "CheckpointError",
    "LdtError",
    "MetadataError",
    "NonFiniteError",
    "PlanError",
    "RemoteStageError",
    "TopologyError",
    "TransferError",
]


class LdtError(Exception):
    """Base class of the errors that the package raises."""


class CheckpointError(LdtError):
    """A checkpoint is damaged, unreadable, or of another model. The text names the file or the tensor."""


class TopologyError(LdtError, ValueError):
    """A topology is invalid. The text names the wrong number."""


class MetadataError(LdtError, ValueError):
    """Metadata of a step cannot be packed, or a message is malformed. The text names the tensor or the byte."""


class NonFiniteError(LdtError, ArithmeticError):
    """A chunk computed a NaN or an infinity. Raised with ``Pipeline(check_finite=True)``.

    The text names the output, loss or gradient, its shape, and how many of its values are NaN, +inf or -inf, but no
    values. ``chunk`` and ``microbatch`` are also in the text.
    """

    def __init__(self, text: str, *, chunk: int, microbatch: int) -> None:
        super().__init__(text)
        self.chunk = chunk
        self.microbatch = microbatch

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), chunk=self.chunk, microbatch=self.microbatch), self.args


class PlanError(LdtError, ValueError):
    """A plan cannot be built, read or verified. The text marks the action in its row if there is one."""


class RemoteStageError(LdtError, RuntimeError):
    """Another rank failed first. The text names the rank and its error.

    ``rank`` is its global rank, ``stage`` its stage, ``place`` what it was doing, as in the text, and ``error_type``
    the class name of its exception, such as "KeyboardInterrupt". Unknown values are None: the process group's store
    itself may have failed.
    """

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        place: str | None = None,
        error_type: str | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.stage = stage
        self.place = place
        self.error_type = error_type


class TransferError(LdtError, RuntimeError):
    """A transfer of this rank failed or timed out, and no other rank reported a cause.

    The text names the message, its channel and both ranks, and what each rank was last seen doing.
    """
