"""Saves and loads checkpoints of the job."""

from __future__ import annotations

from pathlib import Path

import torch

import ldt

__all__ = ["load", "save"]


def save(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint. A collective call; raises on all ranks if one cannot save."""
    ldt.save_checkpoint(folder, pipeline, optimizer, step=step, position=[step], keep=2)


def load(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> int | None:
    """Load the last checkpoint and return its step, None if there is none. A collective call."""
    found = ldt.load_checkpoint(folder, pipeline, optimizer)
    return None if found is None else found.step
