"""A transformer to train, split into chunks in a U or into stages in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import ldt

__all__ = [
    "PRESETS",
    "Block",
    "Microbatch",
    "Setting",
    "cut",
    "make_layers",
    "make_microbatches",
    "mean_squared_error",
]

Microbatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """A model by width and layers, and its step. A microbatch is one row of ``sequence`` hidden states.

    ``edge_layers`` is the number of layers of the head, and of the tail; ``cloud_layers`` that of each chunk between.
    """

    hidden: int
    sequence: int
    microbatches: int
    edge_layers: int
    cloud_layers: int

    def chunk_layers(self, topology: ldt.Topology) -> list[int]:
        """Return the number of layers of each chunk."""
        return [self.edge_layers, *[self.cloud_layers] * (topology.num_chunks - 2), self.edge_layers]

    def stage_layers(self, topology: ldt.Topology) -> list[int]:
        """Return the number of layers of each stage: in a row, as many as the stage has in the U."""
        layers = self.chunk_layers(topology)
        return [
            sum(layers[chunk] for chunk in topology.chunks_of(stage)) for stage in range(topology.num_stages)
        ]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.hidden >= 1024 else torch.float32


PRESETS = {
    "large": Setting(4096, 4096, 8, 2, 5),  # the GPU is always busy
    "medium": Setting(4096, 1024, 16, 2, 5),
    "small": Setting(1024, 256, 16, 2, 5),  # the host is slower than the GPU
    "tiny": Setting(64, 32, 4, 1, 2),  # for the CPU
}


class Block(nn.Module):
    """Causal attention, then two linear layers, each after a norm, on [batch, sequence, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 128)
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attended = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, length, hidden))
        changed: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + changed


def make_layers(setting: Setting, topology: ldt.Topology, device: torch.device) -> list[nn.Module]:
    """Return all layers of the model, equal on every rank, so that each rank can check any of them."""
    torch.manual_seed(0)
    number = sum(setting.chunk_layers(topology))
    with device:
        return [Block(setting.hidden).to(setting.dtype) for _ in range(number)]


def cut(layers: Sequence[nn.Module], numbers: Sequence[int]) -> list[nn.Sequential]:
    """Return the layers in consecutive parts of these sizes."""
    parts, first = [], 0
    for number in numbers:
        parts.append(nn.Sequential(*layers[first : first + number]))
        first += number
    return parts


def make_microbatches(setting: Setting, device: torch.device) -> list[Microbatch]:
    """Return hidden states and their targets, equal on every rank."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, setting.microbatches, 1, setting.sequence, setting.hidden)
    inputs, targets = torch.randn(shape, generator=generator, device=device).to(setting.dtype)
    return list(zip(inputs, targets, strict=True))


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = functional.mse_loss(output.float(), target.float())
    return loss
