"""Draws random numbers that depend only on a seed and a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["drawn_by_name"]


@contextmanager
def drawn_by_name(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU generator by ``seed`` and ``name`` within the context. No generator changes outside."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed accelerators, permanently.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
