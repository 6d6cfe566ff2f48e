"""One of the two processes of a trial. It reports phases and results as lines of JSON."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import threading
from typing import Any

from ldt.cli.lane_check.cxx_runtime import loaded_runtimes, runtime_problem

__all__ = ["IMPORT", "START", "report", "serve"]

START = "start"
IMPORT = "import ldt._C"


def serve(order: dict[str, Any]) -> None:
    """Try the lane described by ``order``: the fields of a LaneKind, ``rank`` and ``port``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    try:
        report(phase=IMPORT)
        module = importlib.import_module("ldt._C")
        report(runtimes=loaded_runtimes(), runtime_problem=runtime_problem(str(module.__file__)))
        importlib.import_module("ldt.cli.lane_check.messages").exchange(order, report)
    except BaseException as error:
        report(error=f"{type(error).__name__}: {error}")
        raise


def report(**fields: object) -> None:
    """Send ``fields`` to the parent."""
    print(json.dumps(fields), flush=True)


def _end_with_parent() -> None:
    """Exit with the parent: standard input closes when the parent ends, for whatever reason."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
