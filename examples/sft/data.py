"""Reads prompts and answers from a file into microbatches; the loss is over the answers. Used only on the edge."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

__all__ = ["Answers", "Microbatch"]

Microbatch = tuple[dict[str, torch.Tensor], torch.Tensor]  # the model's inputs, and labels [batch, sequence]

NO_LABEL = -100
EXPECTED = '{"prompt": "...", "answer": "..."}'
SHOWN = 100  # characters of a malformed line


class Tokenizer(Protocol):
    """The part of a tokenizer that this example uses."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


class ByteTokenizer:
    """For a model without a tokenizer: a byte is a token, and 0 ends a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


class Answers:
    """Lines such as {"prompt": "2 + 2 = ", "answer": "4"}, shuffled anew in each epoch. Skips blank lines.

    A sample of whose answer nothing is within ``longest`` tokens teaches nothing: ``left_out`` counts those. Raises
    ValueError naming the line for one that is not so, or the file if no sample is left.
    """

    def __init__(self, file: Path, model: str, batch: int, longest: int, seed: int) -> None:
        tokenizer, self._padding, end = _tokenizer(model)
        samples = [_tokens(tokenizer, end, longest, *pair) for pair in _pairs(file)]
        self._samples = [(tokens, prompt) for tokens, prompt in samples if len(tokens) > max(1, prompt)]
        self.left_out = len(samples) - len(self._samples)
        if not samples:
            raise ValueError(f"{file} has no samples: expected lines of {EXPECTED}, got none")
        if not self._samples:
            raise ValueError(
                f"{file} has no answer within {longest} tokens, which prompts alone fill: raise --longest"
            )
        self._batch = batch
        self._batches = self._forever(random.Random(seed))

    def next(self, number: int) -> list[Microbatch]:
        """The microbatches of the next step. The last one of the file may be smaller than the others."""
        return [self._padded(samples) for samples in islice(self._batches, number)]

    def _forever(self, chance: random.Random) -> Iterator[Sequence[tuple[list[int], int]]]:
        while True:
            order = chance.sample(self._samples, len(self._samples))
            yield from (order[start : start + self._batch] for start in range(0, len(order), self._batch))

    def _padded(self, samples: Sequence[tuple[list[int], int]]) -> Microbatch:
        size = (len(samples), max(len(tokens) for tokens, _ in samples))
        ids = torch.full(size, self._padding)
        mask, labels = torch.zeros_like(ids), torch.full(size, NO_LABEL)
        for row, (tokens, prompt) in enumerate(samples):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
            labels[row, prompt : len(tokens)] = ids[row, prompt : len(tokens)]
        return {"input_ids": ids, "attention_mask": mask}, labels


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            pair = json.loads(line.decode())
            fault = _fault(pair)
        except ValueError as error:
            fault = f"no JSON in UTF-8 ({error})"
        if fault:
            shown = line.decode(errors="replace")
            raise ValueError(
                f"{file}, line {number}: expected {EXPECTED}, "
                f"got {shown if len(shown) <= SHOWN else shown[:SHOWN] + '...'}: {fault}"
            )
        yield pair["prompt"], pair["answer"]


def _fault(pair: Any) -> str:
    """Describe what is wrong with a line; empty if nothing."""
    if not isinstance(pair, dict):
        return f"an object is needed, not {type(pair).__name__}"
    for key in ("prompt", "answer"):
        if key not in pair:
            return f'no "{key}"'
        if not isinstance(pair[key], str):
            return f'"{key}" must be a string, not {type(pair[key]).__name__}'
        if not pair[key]:
            return f'"{key}" is empty'
    return ""


def _tokens(tokenizer: Tokenizer, end: int, longest: int, prompt: str, answer: str) -> tuple[list[int], int]:
    """Tokenize both. Returns the tokens and how many of them, at the start, are the prompt."""
    asked = tokenizer.encode(prompt)
    return [*asked, *tokenizer.encode(answer, add_special_tokens=False), end][:longest], len(asked)


def _tokenizer(model: str) -> tuple[Tokenizer, int, int]:
    """Load the tokenizer with its tokens for padding and the end of a text."""
    if Path(model).is_file():
        return ByteTokenizer(), 0, 0
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer of {model} has no token that ends a text: set its eos_token")
    return tokenizer, end if tokenizer.pad_token_id is None else tokenizer.pad_token_id, end
