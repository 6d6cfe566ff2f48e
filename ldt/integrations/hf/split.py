"""Divides the layers of a model into chunks and builds them."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ldt.integrations.hf.chunks import (
    Chunk,
    MergingChunk,
    TextChunk,
    TextHead,
    TextTail,
    VisionChunk,
    VisionHead,
)
from ldt.integrations.hf.decoder_chunks import lap_chunk
from ldt.integrations.hf.meta_model import keep_text, keep_vision, materialize, meta_model, tied_names
from ldt.integrations.hf.router_loss import (
    RoutedChunk,
    RoutedHead,
    RoutedTail,
    wants_router_loss,
    without_router_loss,
)
from ldt.integrations.hf.stacks import Part
from ldt.integrations.hf.structure import count_layers, count_stacks, merges_in_place, refuse_split

__all__ = ["Split", "split"]

_TEXT: tuple[type[Chunk], ...] = (TextHead, TextChunk, TextTail)
_ROUTED: tuple[type[Chunk], ...] = (RoutedHead, RoutedChunk, RoutedTail)


def split(
    config: PreTrainedConfig | str | os.PathLike[str], layers: Sequence[int], *, laps: int = 1
) -> Split:
    """Define how a model is split: ``layers`` has the number of layers of each of the C = laps * P + 1 chunks.

    ``config`` is that of a causal language model (one lap), or of a model with an encoder (two laps): vision-language
    models like LLaVA, Qwen2.5-VL and Gemma 3, audio models like Voxtral, and T5 and Whisper. Or it is the model's
    folder or hub name. With one lap all chunks have language layers; the first also has the token embedding, and the
    last, the tail, the final norm and the head. With two laps chunks 0..P-1 have layers of the vision or audio tower
    or of the encoder (the first also what comes before them), chunks P..2P those of the language model or decoder, and
    chunk P, on the edge again, also the end of the tower, its merger or projector, and the token embedding.

    Raises ValueError if the numbers are not whole or do not add up to the model's layers, or if the model cannot be
    split.
    """
    if isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config)
    assert isinstance(config, PreTrainedConfig)
    return Split(config, layers, laps)


class Split:
    """A model's config and the layers of each chunk. Created by ``split``."""

    def __init__(self, config: PreTrainedConfig, layers: Sequence[int], laps: int) -> None:
        if laps not in (1, 2):
            raise ValueError(f"a model is split over 1 lap, or 2 with a vision tower; got laps={laps}")
        layers = _whole("layers", layers)
        laps = int(laps)
        self.num_stages, rest = divmod(len(layers) - 1, laps)
        if self.num_stages < 1 or rest:
            raise ValueError(
                f"layers must have one number per chunk, laps * P + 1 = {laps} * P + 1 of them for P stages; "
                f"got {len(layers)}: {layers}"
            )
        self._general = laps == 2 and not merges_in_place(config)
        text, blocks = (count_stacks if self._general else count_layers)(config, laps)
        self.config, self.laps = config, laps
        self._routed = laps == 1 and wants_router_loss(config)
        self._first_text = self.num_stages if laps == 2 else 0  # the chunk that embeds tokens
        tower = "layers of the encoder" if self._general else "blocks of the vision tower"
        self._blocks = _ranges(tower, layers[: self._first_text], blocks)
        self._layers = _ranges("language layers", layers[self._first_text :], text)
        if self._general:
            refuse_split(config, self._blocks, self._layers)

    @property
    def num_chunks(self) -> int:
        return self.laps * self.num_stages + 1

    def build(
        self,
        chunks: Iterable[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> list[Chunk]:
        """Build only these chunks. Their weights are NaN until they are loaded or initialized.

        ``dtype`` is that of the weights, by default the config's. ``attn_implementation`` is as in transformers. A tied
        embedding in two of these chunks is one Parameter. With ``device="meta"`` nothing is allocated.
        Raises IndexError for a chunk that does not exist, ValueError for a number that is not whole.
        """
        shared: dict[str, nn.Parameter] = {}
        built = []
        for index in _whole("chunks", chunks):
            if not 0 <= index < self.num_chunks:
                raise IndexError(
                    f"the model is split into chunks 0..{self.num_chunks - 1}, there is no {index}"
                )
            config = without_router_loss(self.config) if self._routed else self.config
            model = meta_model(config, self.laps, dtype, attn_implementation)
            tied = tied_names(model)
            chunk = self._in_laps(index, model) if self._general else self._on_meta(index, model)
            chunk.tied = tied
            if torch.device(device).type != "meta":
                materialize(chunk.model, torch.device(device), shared, tied if self._general else {})
            built.append(chunk)
        return built

    def _on_meta(self, index: int, model: PreTrainedModel) -> Chunk:
        first, last = index == self._first_text, index == self.num_chunks - 1
        in_tower = index < self._first_text
        layers = () if in_tower else self._layers[index - self._first_text]
        keep_text(model, layers, embedding=first, head=last)
        if self.laps == 2:
            blocks = self._blocks[index] if in_tower else ()
            keep_vision(model, blocks, embedding=index == 0, merger=first)
        return self._kind(index)(model)

    def _in_laps(self, index: int, model: PreTrainedModel) -> Chunk:
        in_encoder = index < self._first_text
        layers = self._blocks[index] if in_encoder else self._layers[index - self._first_text]
        begins, ends = index in (0, self._first_text), index == self.num_chunks - 1
        return lap_chunk(model, Part(layers, in_encoder, begins, ends))

    def _kind(self, index: int) -> type[Chunk]:
        if index < self._first_text:
            return VisionHead if index == 0 else VisionChunk
        if index == self._first_text and self.laps == 2:
            return MergingChunk
        head, middle, tail = _ROUTED if self._routed else _TEXT
        return head if index == self._first_text else tail if index == self.num_chunks - 1 else middle


def _whole(what: str, numbers: Iterable[int]) -> list[int]:
    try:
        return [operator.index(number) for number in numbers]
    except TypeError:
        raise ValueError(f"{what} must be whole numbers, such as [1, 2, 1], got {numbers!r}") from None


def _ranges(what: str, counts: Sequence[int], total: int) -> list[range]:
    """Return the layers of each chunk, from 0. Raises ValueError if ``counts`` do not add up to ``total``."""
    if any(count < 0 for count in counts) or sum(counts) != total:
        added = " + ".join(map(str, counts))
        raise ValueError(f"the model has {total} {what}, but its chunks have {added} = {sum(counts)}")
    return [range(*pair) for pair in pairwise(accumulate(counts, initial=0))]
