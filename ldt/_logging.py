"""Logs to standard error with the rank before each line if ``LDT_LOG`` is debug, info, warning or error."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["configure"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure() -> None:
    """Configure logging from ``LDT_LOG``. Raises ValueError for an unknown level."""
    wanted = os.environ.get("LDT_LOG", "")
    if not wanted:
        return
    level = _LEVELS.get(wanted.lower())
    if level is None:
        raise ValueError(f"LDT_LOG: expected one of {', '.join(_LEVELS)}, got {wanted!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[rank %(rank)s %(asctime)s.%(msecs)03d] %(message)s", "%H:%M:%S"))
    handler.addFilter(_add_rank)
    logger = logging.getLogger("ldt")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the root logger would print everything again


def _add_rank(record: logging.LogRecord) -> bool:
    """Add the global rank if it is known; torch may not have been imported yet."""
    distributed = sys.modules.get("torch.distributed")
    known = distributed is not None and distributed.is_available() and distributed.is_initialized()
    record.rank = distributed.get_rank() if distributed is not None and known else os.environ.get("RANK", "?")
    return True
