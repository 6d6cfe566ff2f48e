"""The exceptions of the package that need neither torch nor the compiled module."""

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
    """Base of every error the package raises on its own account."""


class CheckpointError(LdtError):
    """A checkpoint that is damaged, cannot be read, or is of another model; the text names the file or the tensor."""


class TopologyError(LdtError, ValueError):
    """A topology that cannot exist; the text names the number that is wrong."""


class MetadataError(LdtError, ValueError):
    """A step's metadata that cannot be packed, or a message that is none; the text names the tensor or the byte."""


class NonFiniteError(LdtError, ArithmeticError):
    """A NaN or an infinity in what a chunk computed: ``Pipeline(check_finite=True)`` looks for them.

    The text names the output, the loss or the gradient, its shape, and how many of its values are what; never a value.
    ``chunk`` and ``microbatch`` are in the text, too.
    """

    def __init__(self, text: str, *, chunk: int, microbatch: int) -> None:
        super().__init__(text)
        self.chunk = chunk
        self.microbatch = microbatch

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), chunk=self.chunk, microbatch=self.microbatch), self.args


class PlanError(LdtError, ValueError):
    """A plan that cannot be built, read or proven; the text shows the place in the grid if there is one."""


class RemoteStageError(LdtError, RuntimeError):
    """Another rank failed first; the text carries which one and its error.

    ``rank`` is its global rank, ``stage`` its stage, ``place`` what it was doing, as in the text, and ``error_type``
    the name of the class of what it raised, such as "KeyboardInterrupt". What is not known is None: the process group's
    store may be what has failed.
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
    """A transfer of this rank failed or took too long, for no reason that another rank has told.

    The text says which message on which channel between whom, and what all ranks were last seen doing.
    """
