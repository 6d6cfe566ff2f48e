"""The failure report that every rank receives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ldt.errors import RemoteStageError
from ldt.runtime.common.error_text import TEXT_LIMIT, type_name
from ldt.runtime.common.peer_messages import quoted, read_fields
from ldt.runtime.common.redact import redacted, unredacted

__all__ = ["FailureReport"]


@dataclass(frozen=True)
class FailureReport:
    """Which rank failed, where, and with what error. Sent to all ranks.

    ``rank`` is the global rank, None if unknown. Made ``in_full``, as on cloud ranks, ``error`` is the text of the
    exception and ``traceback`` the tail of its traceback. Otherwise ``error`` is ``redacted`` and ``traceback`` empty.
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
        """A failure that no rank is known to have caused."""
        return cls(None, None, None, "", error[:TEXT_LIMIT])

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> FailureReport:
        """Inverse of ``to_text``. Accepts anything: reporting a failure must not fail."""
        try:
            return read_fields(cls, text)
        except ValueError:
            return cls.of_unknown(
                f"unreadable failure report {quoted(text)}: check that all ranks run the same version of this package"
            )

    def describe(self) -> str:
        if self.rank is None:
            return f"the mesh has failed: {self.error}"
        place = f" in {self.place}" if self.place else ""
        tail = f"\nIts traceback ends with:\n{self.traceback}" if self.traceback else ""
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}) failed first{place}: {self.error}{tail}"

    def as_error(self, before: str = "") -> RemoteStageError:
        """The error that the other ranks raise, with ``before`` put in front of the report."""
        return RemoteStageError(
            before + self.describe(),
            rank=self.rank,
            stage=self.stage,
            place=self.place or None,
            error_type=self.error_type,
        )
