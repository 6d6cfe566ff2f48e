"""A byte-level transformer in parts, and the assignment of the parts to the chunks of a topology."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from ldt import Topology
from text.options import Options

__all__ = ["ByteModel", "deal", "mean_loss", "split_over", "token_loss"]

BYTES = 256
HEAD_WIDTH = 32
ROTATION_BASE = 10_000.0


class ByteModel:
    """The recipe of a model of ``layers`` layers: part 0 is the embedding, the last part returns the logits.

    Every part draws its weights on the CPU from a seed of its own, so that a rank can build its chunks and nothing
    else, and has the same weights on any device. Raises ValueError if there are fewer layers than chunks.
    """

    def __init__(
        self, topology: Topology, layers: int, width: int, sequence: int, seed: int, *, compiled: bool = False
    ) -> None:
        self._layers = layers
        self._width = width
        self._sequence = sequence
        self._seed = seed
        self._compiled = compiled
        counts = deal(layers, topology)
        counts[0] += 1
        counts[-1] += 1
        self._ends = [sum(counts[: chunk + 1]) for chunk in range(len(counts))]

    @classmethod
    def of(cls, options: Options, topology: Topology) -> ByteModel:
        sizes = options.layers, options.width, options.sequence
        return cls(topology, *sizes, options.seed, compiled=options.compile)

    @property
    def num_chunks(self) -> int:
        return len(self._ends)

    def chunk(self, index: int) -> nn.Sequential:
        """Build chunk ``index``. The first takes bytes [batch, sequence], the last gives logits [..., 256]."""
        begin = self._ends[index - 1] if index > 0 else 0
        return nn.Sequential(*(self._part(number) for number in range(begin, self._ends[index])))

    def _part(self, number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self._seed + number)
            if number == 0:
                return Embedding(self._width)
            if number <= self._layers:
                layer = Layer(self._width, self._layers, self._sequence)
                if self._compiled:
                    layer.compile()
                return layer
            return Output(self._width)


def split_over(mesh: DeviceMesh, chunk: nn.Sequential) -> None:
    """Shard ``chunk`` over the ranks of a stage: the perceptron, and attention if the ranks divide its heads."""
    for layer in chunk:
        if not isinstance(layer, Layer):
            continue
        plan: dict[str, ParallelStyle] = {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}
        if layer.attended.in_features // HEAD_WIDTH % mesh.size() == 0:
            plan |= {"query_key_value": ColwiseParallel(), "attended": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def deal(layers: int, topology: Topology) -> list[int]:
    """The number of layers of each chunk: one, and each further layer goes to the stage that has the fewest."""
    if layers < topology.num_chunks:
        raise ValueError(
            f"{layers} layers cannot be dealt out to {topology.num_chunks} chunks ({topology.num_stages} stages, "
            f"{topology.laps} laps, and the tail): give at least --layers {topology.num_chunks}"
        )
    counts = [1] * topology.num_chunks

    def load(chunk: int) -> tuple[int, int]:
        return sum(counts[other] for other in topology.chunks_of(topology.stage_of(chunk))), counts[chunk]

    for _ in range(layers - topology.num_chunks):
        counts[min(range(topology.num_chunks), key=load)] += 1
    return counts


class Embedding(nn.Module):
    """Embeds each byte as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(BYTES, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.table(text)


class Layer(nn.Module):
    """Pre-norm attention with rotary positions, then a two-layer perceptron."""

    rotation: torch.Tensor

    def __init__(self, width: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation(sequence), persistent=False)
        self.norm_attention = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.norm_perceptron = nn.RMSNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        for linear in (self.query_key_value, self.widen):
            nn.init.normal_(linear.weight, std=width**-0.5)
        for linear in (self.attended, self.narrow):  # keeps the size of the residual stream
            nn.init.normal_(linear.weight, std=(linear.in_features * 2 * layers) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm_attention(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm_perceptron(x))))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        heads = self.query_key_value(x).view(batch, sequence, -1, 3, HEAD_WIDTH)  # local heads, if sharded
        query_key, value = heads.permute(3, 0, 2, 1, 4).split([2, 1])
        query, key = rotate(query_key, self.rotation)
        y = functional.scaled_dot_product_attention(query, key, value[0], is_causal=True)
        return self.attended(y.transpose(1, 2).reshape(batch, sequence, -1))


class Output(nn.Module):
    """A logit for each byte that could come next."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)
        # At first all bytes are about equally likely: a loss of log(256) = 5.5.
        nn.init.normal_(self.scores.weight, std=0.1 * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x))


def rotation(sequence: int) -> torch.Tensor:
    """Cosines and sines [2, sequence, feature pair] of angles that grow with the position, at a rate per pair."""
    paces = ROTATION_BASE ** -torch.linspace(0, 1, HEAD_WIDTH // 2 + 1)[:-1]
    angles = torch.arange(sequence)[:, None] * paces
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rotate the feature pairs (i, i + half) of [..., sequence, feature] by ``by``."""
    (first, second), (cosine, sine) = x.chunk(2, dim=-1), by
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def mean_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of a microbatch, in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def token_loss(logits: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of the cross-entropy, and its number of bytes."""
    loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    return loss, following.numel()
