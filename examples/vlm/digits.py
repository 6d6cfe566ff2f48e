"""The data: images of digits in several sizes, questions about them, and questions without an image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from text.device import CPU, Device
from torch.nn import functional
from transformers import PreTrainedConfig

from ldt.integrations import hf
from vlm.model import MERGE, PATCH
from vlm.words import ABOUT_NUMBERS, ABOUT_ONE, ABOUT_TWO, IMAGE, tokens_of

__all__ = ["Digits", "Microbatch"]

Microbatch = tuple[dict[str, torch.Tensor], torch.Tensor]  # the model's inputs, and labels [batch, sequence]

SIDES = (16, 24, 32)  # pixels; height and width of an image are drawn at random
HELD_OUT = 297  # of the 1797 digits
EVERY = 4  # every fourth microbatch has no images
UNANSWERED = -100


@dataclass(frozen=True)
class Sample:
    """Images [height, width], a question that has a token for each four patches, and the token of the answer."""

    images: tuple[torch.Tensor, ...]
    question: list[int]
    answer: int


class Digits:
    """Microbatches of ``batch`` samples. Only the edge needs them."""

    def __init__(self, config: PreTrainedConfig, batch: int, seed: int, device: Device = CPU) -> None:
        images, names = load_digits(return_X_y=True)
        self._images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 1, 8, 8) / 8 - 1
        self._names = [str(name) for name in names]
        self._config, self._batch, self._seed, self._device = config, batch, seed, device

    def training(self, step: int, number: int) -> list[Microbatch]:
        """The microbatches of a step; they depend only on its number."""
        known = range(len(self._names) - HELD_OUT)
        return [self._draw(known, f"{self._seed} {step} {index}", index) for index in range(number)]

    def held_out(self, number: int) -> list[Microbatch]:
        """Microbatches of held-out digits."""
        unknown = range(len(self._names) - HELD_OUT, len(self._names))
        return [self._draw(unknown, f"{self._seed} held out {index}", index) for index in range(number)]

    def _draw(self, digits: Sequence[int], seed: str, index: int) -> Microbatch:
        chance = random.Random(seed)
        without = index % EVERY == EVERY - 1
        samples = [self._sample(digits, chance, 0 if without else None) for _ in range(self._batch)]
        inputs, labels = _together(self._config, samples)
        *placed, answers = self._device.put((*inputs.values(), labels))
        return dict(zip(inputs, placed, strict=True)), answers

    def _sample(self, digits: Sequence[int], chance: random.Random, number: int | None) -> Sample:
        number = chance.choice((0, 1, 1, 1, 1, 2)) if number is None else number
        if number == 0:
            total = chance.randrange(10)
            first = chance.randint(0, total)
            return _asked((), ABOUT_NUMBERS.format(first, total - first), str(total))
        chosen = chance.sample(digits, number)
        asked = chance.randrange(number)
        question = chance.choice(ABOUT_ONE) if number == 1 else ABOUT_TWO[asked]
        images = tuple(self._image(digit, chance) for digit in chosen)
        return _asked(images, question, self._names[chosen[asked]])

    def _image(self, digit: int, chance: random.Random) -> torch.Tensor:
        size = [chance.choice(SIDES), chance.choice(SIDES)]
        return functional.interpolate(self._images[digit], size=size, mode="bilinear")[0, 0]


def _asked(images: tuple[torch.Tensor, ...], question: str, answer: str) -> Sample:
    shown = [token for image in images for token in _placeholder(image)]
    return Sample(images, [*tokens_of("<start>"), *shown, *tokens_of(question)], tokens_of(answer)[0])


def _placeholder(image: torch.Tensor) -> list[int]:
    return [
        *tokens_of("<images>"),
        *[IMAGE] * (image.numel() // (PATCH * MERGE) ** 2),
        *tokens_of("</images>"),
    ]


def _together(config: PreTrainedConfig, samples: Sequence[Sample]) -> Microbatch:
    """Pad questions on the left, so that all answers are at the end."""
    longest = max(len(sample.question) for sample in samples) + 1
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, UNANSWERED)
    for row, sample in enumerate(samples):
        text = torch.tensor([*sample.question, sample.answer])
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
        labels[row, -1] = sample.answer
    inputs = {"input_ids": ids, "attention_mask": mask}
    images = [image for sample in samples for image in sample.images]
    if images:
        inputs["pixel_values"] = torch.cat([_patches(image) for image in images])
        inputs["image_grid_thw"] = torch.tensor(
            [[1, *(side // PATCH for side in image.shape)] for image in images]
        )
    inputs["position_ids"] = hf.position_ids(config, ids, mask, inputs.get("image_grid_thw"))
    return inputs, labels


def _patches(image: torch.Tensor) -> torch.Tensor:
    """Return [patches, pixels per patch]; patches that become one token are adjacent."""
    height, width = (side // (PATCH * MERGE) for side in image.shape)
    blocks = image.view(height, MERGE, PATCH, width, MERGE, PATCH)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, PATCH * PATCH)
