"""A pipeline behind the interface of ``torch.distributed.pipelining``."""

from __future__ import annotations

from ldt.integrations.pipelining.schedule import Schedule

__all__ = ["Schedule"]
