"""Puts tokenized samples into rows and microbatches. A step's microbatches depend only on its number."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain

import torch

from ldt.integrations import hf
from sft.tokens import Tokenized

__all__ = ["Batches", "Microbatch"]

Microbatch = tuple[dict[str, torch.Tensor], torch.Tensor]  # the model's inputs, and labels [batch, sequence]

NO_LABEL = -100
LENGTHS = 64  # padded rows have multiples of this many tokens, so that few shapes occur


class Batches:
    """Microbatches of ``batch`` rows. A sample of which nothing is learned within ``longest`` is ``left_out``.

    Args:
        samples: At least one must teach something.
        batch: Rows of a microbatch.
        longest: Tokens of a row; longer samples are cut.
        padding: The token of empty places.
        packing: Put several samples into a row of ``longest`` tokens. They do not attend to each other.
        seed: Of the order of rows, which changes in every epoch.
    """

    def __init__(
        self, samples: Sequence[Tokenized], batch: int, longest: int, padding: int, packing: bool, seed: int
    ) -> None:
        cut = [sample.cut(longest) for sample in samples]
        kept = [sample for sample in cut if sample.teaches]
        self.left_out = len(cut) - len(kept)
        if not kept:
            raise ValueError(f"no sample has an answer within {longest} tokens: raise data.longest")
        self.rows = _pack(kept, longest) if packing else [[sample] for sample in kept]
        self._batch, self._longest, self._padding = batch, longest, padding
        self._packing, self._seed = packing, seed

    def steps(self, epochs: float, microbatches: int) -> int:
        """The number of steps in which each row comes ``epochs`` times."""
        return max(1, math.ceil(epochs * len(self.rows) / (microbatches * self._batch)))

    def step(self, step: int, microbatches: int, replica: int = 0, replicas: int = 1) -> list[Microbatch]:
        """The microbatches of a training step for one of the edge's replicas."""
        first = (step * replicas + replica) * microbatches * self._batch
        rows = [self._row(first + index) for index in range(microbatches * self._batch)]
        return self._microbatches(rows)

    def all(self) -> list[Microbatch]:
        """Every row once, in order; the last microbatch may be smaller."""
        return self._microbatches(self.rows)

    def _row(self, index: int) -> list[Tokenized]:
        epoch, place = divmod(index, len(self.rows))
        if epoch != getattr(self, "_epoch", None):
            self._epoch = epoch
            self._order = list(range(len(self.rows)))
            random.Random(f"{self._seed} {epoch}").shuffle(self._order)
        return self.rows[self._order[place]]

    def _microbatches(self, rows: Sequence[list[Tokenized]]) -> list[Microbatch]:
        starts = range(0, len(rows), self._batch)
        return [self._tensors(rows[start : start + self._batch]) for start in starts]

    def _tensors(self, rows: Sequence[list[Tokenized]]) -> Microbatch:
        longest = max(sum(len(sample.tokens) for sample in row) for row in rows)
        length = (
            self._longest if self._packing else min(self._longest, LENGTHS * math.ceil(longest / LENGTHS))
        )
        ids = torch.full((len(rows), length), self._padding)
        labels, segments = torch.full_like(ids, NO_LABEL), torch.full_like(ids, -1)
        for number, row in enumerate(rows):
            tokens = torch.tensor(list(chain.from_iterable(sample.tokens for sample in row)))
            learned = torch.tensor(list(chain.from_iterable([False, *sample.learned[1:]] for sample in row)))
            ids[number, : len(tokens)] = tokens
            labels[number, : len(tokens)] = tokens.where(learned, NO_LABEL)
            sizes = torch.tensor([len(sample.tokens) for sample in row])
            segments[number, : len(tokens)] = torch.arange(len(row)).repeat_interleave(sizes)
        if self._packing:
            return {"input_ids": ids, "position_ids": hf.packed_position_ids(segments)}, labels
        return {"input_ids": ids, "attention_mask": (segments == 0).long()}, labels


def _pack(samples: Sequence[Tokenized], longest: int) -> list[list[Tokenized]]:
    """Put samples into few rows of at most ``longest`` tokens: each, longest first, into the fullest row it fits."""
    rows: list[list[Tokenized]] = []
    by_room: dict[int, list[int]] = {}  # rows by the tokens that are free in them
    for sample in sorted(samples, key=lambda sample: len(sample.tokens), reverse=True):
        needed = len(sample.tokens)
        room = min((room for room, found in by_room.items() if found and room >= needed), default=longest)
        row = by_room[room].pop() if by_room.get(room) else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        by_room.setdefault(room - needed, []).append(row)
    return rows
