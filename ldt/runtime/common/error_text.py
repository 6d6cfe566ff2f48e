"""Reads exceptions safely: a broken or slow ``__str__``, ``__class__`` or metaclass cannot break the report."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType

from ldt.untrusted import MAX_CHARACTERS, plain

__all__ = [
    "TEXT_LIMIT",
    "TRACEBACK_LINES",
    "plain",
    "raised_at",
    "safe_isinstance",
    "safe_str",
    "traceback_files",
    "traceback_tail",
    "type_name",
]

TEXT_LIMIT = MAX_CHARACTERS
_NAME_LIMIT = 200
TRACEBACK_LINES = 12
_TIMEOUT_SECONDS = 0.5


def safe_isinstance(error: BaseException, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the real type of ``error``: an overridden ``__class__`` is ignored."""
    return issubclass(type(error), kinds)


def type_name(error: BaseException) -> str:
    """The class name of ``error``: an overriding metaclass is ignored."""
    return plain(type.__dict__["__name__"].__get__(type(error)), _NAME_LIMIT)


def safe_str(error: BaseException) -> str:
    """The first 4000 printable characters of ``str(error)``; a placeholder if that raises or hangs."""
    return _read(lambda: str.__getitem__(str(error), slice(TEXT_LIMIT)), "(its text cannot be read)")


def traceback_tail(error: BaseException) -> str:
    """The last lines of the traceback of ``error``."""
    return _read(lambda: _last_lines(_trace_of(error)), "")


def raised_at(error: BaseException) -> tuple[str, int, str] | None:
    """The file, line and function that raised ``error``; None if it was never raised."""
    traces = _traces_of(error)
    if not traces:
        return None
    code: CodeType = traces[-1].tb_frame.f_code
    return code.co_filename, traces[-1].tb_lineno, code.co_name


def traceback_files(error: BaseException) -> list[str]:
    """The files of the traceback of ``error``, ending with the one that raised it."""
    return [trace.tb_frame.f_code.co_filename for trace in _traces_of(error)]


def _traces_of(error: BaseException) -> list[TracebackType]:
    traces = []
    trace = _trace_of(error)
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    return traces


def _trace_of(error: BaseException) -> TracebackType | None:
    trace: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return trace


def _last_lines(trace: TracebackType | None) -> str:
    lines = "".join(traceback.format_tb(trace, limit=-TRACEBACK_LINES)).splitlines()
    return "\n".join(line[: TEXT_LIMIT // TRACEBACK_LINES] for line in lines[-TRACEBACK_LINES:])


def _read(read: Callable[[], str], otherwise: str) -> str:
    """The result of ``read``, or ``otherwise`` if that fails.

    ``read`` runs user code, so it gets a thread of its own, which is stopped after half a second.
    """
    found = [otherwise]

    def run() -> None:
        try:
            found[0] = plain(read())
        except BaseException:  # the error to report is another one
            return

    thread = threading.Thread(target=run, name="ldt-error-text", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # too many threads, or the interpreter is shutting down
        run()
        return found[0]
    thread.join(_TIMEOUT_SECONDS)
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
    return found[0]
