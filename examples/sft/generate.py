"""Continues texts with the trained model, one token for each eval. What is written never leaves the edge."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

import ldt
from sft.batches import LENGTHS, NO_LABEL
from sft.tokens import Tokenizer

__all__ = ["continued"]


def continued(
    leader: ldt.Leader,
    tokenizer: Tokenizer,
    prompts: list[str],
    number: int,
    computing: AbstractContextManager[object],
) -> list[str]:
    """The most likely ``number`` tokens behind each prompt; fewer where the text ends."""
    device = leader.pipeline.mesh.device
    texts = [tokenizer.encode(prompt) for prompt in prompts]
    begins = [len(text) for text in texts]
    ended = [False] * len(texts)
    for _ in range(number):
        longest = LENGTHS * (
            max(map(len, texts)) // LENGTHS + 1
        )  # few shapes; nothing sees the padding behind it
        ids = torch.tensor(
            [text + [tokenizer.padding] * (longest - len(text)) for text in texts], device=device
        )
        with computing:
            outputs = leader.eval([({"input_ids": ids}, torch.full_like(ids, NO_LABEL))]).outputs
        assert outputs is not None
        for index, text in enumerate(texts):
            token = int(outputs[0][index, len(text) - 1].argmax())
            ended[index] = ended[index] or token == tokenizer.end
            if not ended[index]:
                text.append(token)
        if all(ended):
            break
    return [tokenizer.decode(text[begin:]) for text, begin in zip(texts, begins, strict=True)]
