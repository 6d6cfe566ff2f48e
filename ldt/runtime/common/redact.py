"""Decides what other ranks learn of an exception.

A cloud rank's exception is sent in full. An edge rank's is redacted, as its text may quote a sample.
"""

from __future__ import annotations

from typing import Any

from ldt._C import LaneError
from ldt.errors import LdtError
from ldt.runtime.common.error_text import (
    TEXT_LIMIT,
    raised_at,
    safe_isinstance,
    safe_str,
    traceback_tail,
    type_name,
)

__all__ = ["InputTypeError", "InputValueError", "QuotingError", "redacted", "unredacted"]


class InputValueError(LdtError, ValueError):
    """The caller's input cannot be used. The text holds names, numbers and shapes, never values of a sample."""


class InputTypeError(LdtError, TypeError):
    """Like InputValueError, for input of the wrong type."""


class QuotingError(LdtError):
    """An error of this package whose text quotes an exception of user code; ``plain`` does not.

    Users and other ranks see an LdtError, in messages and tracebacks, too.
    """

    __module__ = LdtError.__module__
    __qualname__ = LdtError.__qualname__

    def __init__(self, text: str, plain: str) -> None:
        super().__init__(text)
        self.plain = plain

    def and_also(self, more: str) -> QuotingError:
        """The same error with ``more``, which quotes nothing, appended."""
        return QuotingError(f"{self}{more}", plain=f"{self.plain}{more}")

    def __reduce__(self) -> tuple[Any, ...]:
        return LdtError, self.args


QuotingError.__name__ = LdtError.__name__


def unredacted(error: BaseException) -> tuple[str, str]:
    """The text of ``error``, at most 4000 characters, and the tail of its traceback."""
    return f"{type_name(error)}: {safe_str(error)}"[:TEXT_LIMIT], traceback_tail(error)


def redacted(error: BaseException) -> str:
    """What may leave the edge: the type of ``error``, and the file, line and function that raised it.

    An exception's text may quote a sample, and so may a source line. Exceptions of this package quote only names,
    shapes and numbers, so their text is kept.
    """
    kind = type_name(error)
    if safe_isinstance(error, QuotingError):
        return f"{kind}: {error.plain}"[:TEXT_LIMIT]  # type: ignore[attr-defined]
    if safe_isinstance(error, (LdtError, LaneError)) and _is_of_package(type(error)):
        return f"{kind}: {safe_str(error)}"[:TEXT_LIMIT]
    place = raised_at(error)
    where = "" if place is None else " raised at {}:{} in {}".format(*place)
    return f"{kind}{where} (its text stays on the edge unless connect(share_edge_errors=True) there)"


def _is_of_package(kind: type) -> bool:
    """False for a user's class derived from one of this package."""
    module: object = type.__dict__["__module__"].__get__(kind)
    return isinstance(module, str) and module.partition(".")[0] == "ldt"
