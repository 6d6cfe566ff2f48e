"""A failure as all ranks are told of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ldt.errors import RemoteStageError
from ldt.runtime.common.error_text import TEXT_LIMIT, type_name
from ldt.runtime.common.redact import redacted, unredacted
from ldt.runtime.common.untrusted import quoted, read_fields

__all__ = ["FailureReport"]


@dataclass(frozen=True)
class FailureReport:
    """Who failed, where, and with what; it goes to all ranks. ``rank`` is the global rank, None where it is not known.

    ``error`` is the text of the exception, and ``traceback`` the end of its traceback, where ``of`` is told to give
    them in full, as for a rank of the cloud. Otherwise ``error`` is what ``redacted`` lets out.
    """

    rank: int | None
    stage: int | None
    replica: int | None
    place: str
    error: str
    error_type: str | None = None
    traceback: str = ""

    @classmethod
    def of(
        cls, error: BaseException, rank: int, stage: int, replica: int, place: str, *, in_full: bool
    ) -> FailureReport:
        text, trace = unredacted(error) if in_full else (redacted(error), "")
        return cls(rank, stage, replica, place, text, type_name(error), trace)

    @classmethod
    def of_unknown(cls, error: str) -> FailureReport:
        """A failure that is not known to be that of a rank."""
        return cls(None, None, None, "", error[:TEXT_LIMIT])

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> FailureReport:
        """Read what ``to_text`` gives, or whatever else stands there: a report must never fail to be reported."""
        try:
            return read_fields(cls, text)
        except ValueError:
            return cls.of_unknown(
                f"unreadable failure report {quoted(text)}: do all ranks run the same version of this package?"
            )

    def describe(self) -> str:
        if self.rank is None:
            return f"the mesh has failed: {self.error}"
        place = f" in {self.place}" if self.place else ""
        tail = f"\nIts traceback ends with:\n{self.traceback}" if self.traceback else ""
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}) failed first{place}: {self.error}{tail}"

    def as_error(self, before: str = "") -> RemoteStageError:
        """What the other ranks raise; the text ``before`` goes before the report."""
        return RemoteStageError(
            before + self.describe(),
            rank=self.rank,
            stage=self.stage,
            place=self.place or None,
            error_type=self.error_type,
        )
