"""Helpers for tests with several ranks: a pool of processes, toy models, and the unsplit model as a reference."""

from ldt.testing.models import (
    SleepingChunk,
    ToyChunk,
    toy_chunks,
    toy_loss,
    toy_microbatches,
    unsplit_step,
)
from ldt.testing.pool import RankError, RankPool
from ldt.testing.slowness import allowed, in_time, paced

__all__ = [
    "RankError",
    "RankPool",
    "SleepingChunk",
    "ToyChunk",
    "allowed",
    "in_time",
    "paced",
    "toy_chunks",
    "toy_loss",
    "toy_microbatches",
    "unsplit_step",
]
