"""Gradient clipping, loss scaling, checkpoints over all stages, and the loop: the edge leads, the cloud follows."""

from ldt.train.checkpoint import LoadedCheckpoint, load_checkpoint, merge_checkpoint, save_checkpoint
from ldt.train.follower import follow
from ldt.train.grad_norm import clip_grad_norm_
from ldt.train.grad_scaler import GradScaler
from ldt.train.leader import Leader
from ldt.train.live_view import LiveView

__all__ = [
    "GradScaler",
    "Leader",
    "LiveView",
    "LoadedCheckpoint",
    "clip_grad_norm_",
    "follow",
    "load_checkpoint",
    "merge_checkpoint",
    "save_checkpoint",
]
