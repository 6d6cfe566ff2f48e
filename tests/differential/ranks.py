"""Parts that know which rank of its stage they run on."""

from __future__ import annotations

import torch

from differential.layers import Extras, Part

__all__ = ["Uneven"]


class Uneven(Part):
    """Differs between the ranks of a stage, as layers do that keep a part of the sequence each."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.rank = 0  # given by who builds it there

    def forward(self, x: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, Extras]:
        return (1 + self.rank) * x, extras
