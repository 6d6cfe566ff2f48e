"""What the Trainer takes for the model: the edge's chunks, with the signature of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.integrations.hf.chunks import Chunk
from ldt.train import Leader

__all__ = ["EdgeModel"]


class EdgeModel(nn.Module):
    """The edge's chunks. Switches all ranks between train and eval mode; only the Trainer runs them.

    ``forward`` has the arguments of the model that the chunks are parts of: they decide which columns of a data set
    the Trainer keeps.
    """

    accepts_loss_kwargs = True
    main_input_name = "input_ids"

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self._models = [chunk.model for chunk in chunks]
        self.config = copy.deepcopy(chunks[0].config)  # the Trainer changes it
        self.loss_type = chunks[0].model.loss_type
        self.generation_config = chunks[0].model.generation_config
        self._leader: Leader | None = None

    def follow(self, leader: Leader) -> None:
        """From now on, switch modes through ``leader``."""
        self._leader = leader
        leader.train(self.training)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise LdtError(
            "only part of the model is on the edge, so it cannot be called: use training_step, evaluate and predict of "
            "the Trainer, or ldt.Leader.eval"
        )

    def train(self, mode: bool = True) -> EdgeModel:
        """Switch the chunks of all ranks, if they are in the other mode."""
        if self._leader is None:
            return super().train(mode)
        if self.training != mode:
            self._leader.train(mode)
            self.training = mode
        return self

    def add_model_tags(self, tags: Any) -> None:
        """Do nothing: tags are for a model card."""

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Compute activations of the edge's layers again in the backward."""
        for model in self._models:
            model.activation_checkpointing_enable(**options)
