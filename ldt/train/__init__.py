"""Gradient clipping, loss scaling and checkpoints over all stages, for the training loop around the pipeline."""

from ldt.train.checkpoint import LoadedCheckpoint, load_checkpoint, merge_checkpoint, save_checkpoint
from ldt.train.grad_norm import clip_grad_norm_
from ldt.train.grad_scaler import GradScaler

__all__ = [
    "GradScaler",
    "LoadedCheckpoint",
    "clip_grad_norm_",
    "load_checkpoint",
    "merge_checkpoint",
    "save_checkpoint",
]
