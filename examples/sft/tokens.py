"""Turns samples into tokens, and says which of them the model learns to predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformers import AutoTokenizer

from sft.samples import Sample

__all__ = ["Tokenized", "Tokenizer", "load_tokenizer", "tokenize"]


class Tokenized(NamedTuple):
    """The tokens of a sample, and whether each is learned."""

    tokens: list[int]
    learned: list[bool]

    def cut(self, longest: int) -> Tokenized:
        return Tokenized(self.tokens[:longest], self.learned[:longest])

    @property
    def teaches(self) -> bool:
        """Whether anything is learned; nothing predicts the first token."""
        return any(self.learned[1:])


class Tokenizer(Protocol):
    """What this recipe needs of a tokenizer. ``end`` is the token behind a text, ``padding`` that of empty places."""

    end: int
    padding: int

    def encode(self, text: str, *, begins: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def templated(self, messages: list[dict[str, str]], *, answers: bool = False) -> list[int]:
        """The tokens of a chat; with ``answers`` up to where the assistant begins to speak."""
        ...


class Bytes:
    """For a model without a tokenizer: a byte is a token, and 0 ends a text."""

    end = padding = 0

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def templated(self, messages: list[dict[str, str]], *, answers: bool = False) -> list[int]:
        raise ValueError("samples with messages need a model folder whose tokenizer has a chat template")


class OfModel:
    """The tokenizer of a model folder or hub name."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model} has no token that ends a text: set its eos_token")
        self.end: int = self._tokenizer.eos_token_id
        padding = self._tokenizer.pad_token_id
        self.padding: int = self.end if padding is None else padding

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def templated(self, messages: list[dict[str, str]], *, answers: bool = False) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {self._model} has no chat template, which messages need")
        options = {"tokenize": True, "return_dict": False, "add_generation_prompt": answers}
        return list(self._tokenizer.apply_chat_template(messages, **options))


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model folder or hub name; bytes for the file of a config."""
    return Bytes() if Path(model).is_file() else OfModel(model)


def tokenize(tokenizer: Tokenizer, sample: Sample) -> Tokenized:
    """Tokenize a sample. What is learned: an answer and its end, what the assistant says, or all of a text."""
    if "messages" in sample:
        return _chat(tokenizer, sample["messages"])
    prompt = tokenizer.encode(sample["prompt"]) if "prompt" in sample else []
    text = sample["answer"] if "prompt" in sample else sample["text"]
    rest = [*tokenizer.encode(text, begins=not prompt), tokenizer.end]
    return Tokenized([*prompt, *rest], [False] * len(prompt) + [True] * len(rest))


def _chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Tokenized:
    tokens = tokenizer.templated(messages)
    learned = [False] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.templated(messages[:index], answers=True)
            after = tokenizer.templated(messages[: index + 1])
            if tokens[: len(after)] != after or after[: len(before)] != before:
                raise ValueError(
                    "the chat template renders the beginning of a chat differently once it goes on, so nobody can say "
                    "which tokens are answers: use samples with one answer, or a template that does not"
                )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return Tokenized(tokens, learned)
