"""What a training loop needs around the pipeline: gradient norm and loss scaling over all stages."""

from ldt.train.grad_norm import clip_grad_norm_
from ldt.train.grad_scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_"]
