"""Random numbers that depend on a seed and a name alone, not on what else is drawn or where."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["drawn_by_name"]


@contextmanager
def drawn_by_name(seed: int, name: str) -> Iterator[None]:
    """Seed what is drawn on the CPU inside by ``seed`` and ``name``; outside no random generator is touched."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed accelerators, too, and leave them so.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
