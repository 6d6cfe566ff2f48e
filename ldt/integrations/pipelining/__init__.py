"""A pipeline behind the interface of ``torch.distributed.pipelining``."""

from __future__ import annotations

from ldt.integrations.pipelining.schedule import Schedule
from ldt.integrations.pipelining.traced import TracedChunk, from_pipe

__all__ = ["Schedule", "TracedChunk", "from_pipe"]
