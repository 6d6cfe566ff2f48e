"""Runs a command that the kernel kills when the process that started it ends: tether.py PARENT COMMAND ARGUMENT ...

A launcher that was killed leaves no rank behind then. Run as a file, so it imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; it survives exec


def _main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
