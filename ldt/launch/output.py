"""What ranks print, line by line with the site and the rank before each line, and what the launcher says itself."""

from __future__ import annotations

import os
import sys
import threading
from typing import TextIO

__all__ = ["Output", "say"]

_SECONDS = 2.0  # to read the rest of what ended ranks have printed
_lock = threading.Lock()


def say(site: str, text: str) -> None:
    """Print a line about the job to standard error."""
    _write(sys.stderr, f"[{site}] {text}")


class Output:
    """Pipes of some processes, each read by a thread that prints its lines."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._write_ends: list[int] = []

    def pipe(self, prefix: str, target: TextIO) -> str:
        """Return a file to write to. Its lines go to ``target`` with ``prefix`` before them."""
        read_end, write_end = os.pipe()
        self._write_ends.append(write_end)
        thread = threading.Thread(target=_copy, args=(read_end, prefix, target), daemon=True)
        thread.start()
        self._threads.append(thread)
        return f"/dev/fd/{write_end}"

    def close_here(self) -> None:
        """Close this process's ends, so that the lines end with the processes that write them."""
        for end in self._write_ends:
            os.close(end)
        self._write_ends.clear()

    def drain(self) -> None:
        """Wait until all lines are printed, but not for a process that lives on with a pipe in its hands."""
        for thread in self._threads:
            thread.join(_SECONDS)


def _copy(read_end: int, prefix: str, target: TextIO) -> None:
    """A carriage return ends a line, too: a progress bar has no other end."""
    with open(read_end, encoding="utf-8", errors="replace", newline=None) as lines:
        for line in lines:
            _write(target, prefix + line.rstrip("\n"))


def _write(target: TextIO, line: str) -> None:
    with _lock:
        try:
            target.write(line + "\n")
            target.flush()
        except (OSError, ValueError):  # nobody reads any more; the ranks go on
            pass
