"""Saving and loading in the job, in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ldt
from ldt.runtime.calls import agree

__all__ = ["load", "save"]

KEEP = 2


def save(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A collective call; raises on all ranks if one cannot save."""
    if hasattr(ldt, "save_checkpoint"):
        ldt.save_checkpoint(folder, pipeline, optimizer, step=step, position=[step], keep=KEEP)
    else:
        _save(folder, pipeline, optimizer, step)


def load(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> int | None:
    """The step of the checkpoint that was loaded, None if there is none. A collective call."""
    if hasattr(ldt, "load_checkpoint"):
        found = ldt.load_checkpoint(folder, pipeline, optimizer)
        return None if found is None else found.step
    return _load(folder, pipeline, optimizer)


# A stand-in until ldt has checkpoints of its own.


def _save(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    mesh = pipeline.mesh
    target = folder / f"step-{step}" / f"rank-{mesh.rank}.pt"
    error: Exception | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        state = {"optimizer": optimizer.state_dict(), "chunks": [c.state_dict() for c in pipeline.chunks]}
        torch.save(state, target.with_suffix(".part"))
        target.with_suffix(".part").rename(target)
    except Exception as caught:
        error = caught
    agree(mesh, "save_checkpoint()", error, {})


def _load(folder: Path, pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer) -> int | None:
    mesh = pipeline.mesh
    steps = [
        int(found.name.removeprefix("step-"))
        for found in folder.glob("step-*")
        if len(list(found.glob("rank-*.pt"))) == mesh.topology.world_size
    ]
    if not steps:
        return None
    state: dict[str, Any] = torch.load(folder / f"step-{max(steps)}" / f"rank-{mesh.rank}.pt")
    optimizer.load_state_dict(state["optimizer"])
    for chunk, weights in zip(pipeline.chunks, state["chunks"], strict=True):
        chunk.load_state_dict(weights)
    return max(steps)
