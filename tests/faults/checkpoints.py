"""Saving and loading in the job, in one place."""

from __future__ import annotations

from pathlib import Path

import torch

import ldt

__all__ = ["load", "save"]


def save(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A collective call; raises on all ranks if one cannot save."""
    ldt.save_checkpoint(folder, pipeline, optimizer, step=step, position=[step], keep=2)


def load(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> int | None:
    """The step of the checkpoint that was loaded, None if there is none. A collective call."""
    found = ldt.load_checkpoint(folder, pipeline, optimizer)
    return None if found is None else found.step
