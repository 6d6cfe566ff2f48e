"""The Trainer of transformers on the edge, for a pipeline: ``pip install 'ldt-torch[trainer]'``.

Cloud ranks run ``ldt.follow``: they need no data set, no training loop and no learning rate of their own.
"""

from ldt.integrations.hf.trainer.optimizers import create_optimizer
from ldt.integrations.hf.trainer.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin", "create_optimizer"]
