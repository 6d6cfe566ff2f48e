"""Reads the text and draws microbatches from it."""

from __future__ import annotations

import torch

from text.device import CPU, Device
from text.options import Options

__all__ = ["Corpus", "Microbatch"]

Microbatch = tuple[
    torch.Tensor, torch.Tensor
]  # bytes [batch, sequence], and the byte that follows each of them

HELD_OUT = 0.05  # share at the end of the text, for evaluation


class Corpus:
    """A text as bytes, split into a training and a held-out part. Only the edge needs one.

    Raises ValueError if the text is too short for sequences of ``sequence`` bytes.
    """

    def __init__(self, text: bytes, batch: int, sequence: int, seed: int, device: Device = CPU) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = round(len(data) * (1 - HELD_OUT))
        self._learned, self._held_out = data[:cut], data[cut:]
        self._shape = (batch, sequence)
        self._seed = seed
        self._device = device
        if len(self._held_out) <= sequence:
            needed = round((sequence + 1) / HELD_OUT)
            raise ValueError(f"the text has {len(data)} bytes; --sequence {sequence} needs at least {needed}")

    @classmethod
    def load(cls, options: Options, device: Device = CPU) -> Corpus:
        """Read the text that ``options`` name. Raises OSError if that fails."""
        text = _documentation() if options.text is None else options.text.read_bytes()
        return cls(text, options.batch, options.sequence, options.seed, device)

    def training(self, step: int, number: int, replica: int = 0) -> list[Microbatch]:
        """The ``number`` microbatches of a training step, at random positions that depend only on the step.

        Each ``replica`` of the edge has its own; those of several are the first replica's for as many in all.
        """
        indices = range(replica * number, (replica + 1) * number)
        return [self._draw(self._learned, self._seed + 1_000_003 * step + index) for index in indices]

    def held_out(self, number: int) -> list[Microbatch]:
        """Microbatches of the held-out text."""
        return [self._draw(self._held_out, self._seed + index) for index in range(number)]

    def _draw(self, data: torch.Tensor, seed: int) -> Microbatch:
        batch, sequence = self._shape
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - sequence, (batch, 1), generator=generator)
        windows = data[starts + torch.arange(sequence + 1)].long()
        text, following = self._device.put((windows[:, :-1], windows[:, 1:]))
        return text, following


def _documentation() -> bytes:
    """The documentation topics that come with every Python: half a megabyte of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()
