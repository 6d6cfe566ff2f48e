"""Lightning modules for the edge. Ranks of the cloud do not import them, nor Lightning."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from ldt.integrations.lightning import PipelineModule
from ldt.testing import toy_loss

__all__ = ["QUIET", "ModelCheckpoint", "Split", "Trainer", "Whole", "loader"]

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


def loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)


class Whole(lightning.LightningModule):
    """The unsplit model. A batch is a microbatch: Lightning accumulates gradients."""

    def __init__(self, chunks: list[nn.Module], optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.model = nn.Sequential(*chunks)
        self.steps = [optimizer], [scheduler]
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = toy_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", toy_loss(self.model(batch[0]), batch[1]), batch_size=1)

    def configure_optimizers(self) -> Any:
        return self.steps


class Split(PipelineModule):
    """Remembers losses."""

    losses: list[torch.Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.losses.append(loss)
        return loss
