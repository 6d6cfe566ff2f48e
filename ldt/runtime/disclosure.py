"""What other ranks learn of an exception: everything of one on the cloud, of one on the edge nothing it may quote."""

from __future__ import annotations

import traceback
from types import CodeType

from ldt._C import LaneError
from ldt.errors import LdtError

__all__ = ["InputTypeError", "InputValueError", "QuotingError", "disclose", "reveal"]

TEXT_LIMIT = 4000
TRACEBACK_LINES = 12


class InputValueError(LdtError, ValueError):
    """What the caller gave cannot be used. The text has names, numbers and shapes, never what is in a sample."""


class InputTypeError(LdtError, TypeError):
    """As InputValueError, for a thing of the wrong type."""


class QuotingError(LdtError):
    """An error of the package's own whose text quotes an exception of the user's code; ``plain`` does not."""

    def __init__(self, text: str, plain: str) -> None:
        super().__init__(text)
        self.plain = plain


def reveal(error: BaseException) -> tuple[str, str]:
    """The text of ``error``, at most 4000 characters, and the last lines of its traceback."""
    lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return f"{type(error).__name__}: {error}"[:TEXT_LIMIT], "\n".join(lines[-TRACEBACK_LINES:])


def disclose(error: BaseException) -> str:
    """What may leave the edge: the type of ``error`` and the file, line and function that raised it.

    An exception's own text may quote a sample, and so may a source line. The text of the package's own exceptions
    holds names, shapes and figures only and is kept.
    """
    kind = type(error).__name__
    if isinstance(error, QuotingError):
        return f"{kind}: {error.plain}"[:TEXT_LIMIT]
    if isinstance(error, (LdtError, LaneError)):
        return f"{kind}: {error}"[:TEXT_LIMIT]
    return f"{kind}{_where(error)} (its text stays on the edge unless connect(share_edge_errors=True) there)"


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code: CodeType = trace.tb_frame.f_code
    return f" raised at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"
