"""What a training loop needs around the pipeline: so far the gradient norm over all stages."""

from ldt.train.grad_norm import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
