"""The vocabulary of the example: one token per word."""

from __future__ import annotations

__all__ = ["ABOUT_NUMBERS", "ABOUT_ONE", "ABOUT_TWO", "IMAGE", "VOCABULARY", "tokens_of"]

ABOUT_ONE = ("which digit is this ?", "what number do you see ?", "name the digit :")
ABOUT_TWO = ("which digit is the first ?", "which digit is the second ?")
ABOUT_NUMBERS = "what is {} plus {} ?"  # whose sum is a digit

_SPECIAL = ("<padding>", "<start>", "<image>", "<video>", "<images>", "</images>")
_DIGITS = tuple("0123456789")
_WORDS = sorted({word for text in (*ABOUT_ONE, *ABOUT_TWO, ABOUT_NUMBERS) for word in text.split()} - {"{}"})

VOCABULARY = (*_SPECIAL, *_DIGITS, *_WORDS)
IMAGE = VOCABULARY.index("<image>")


def tokens_of(text: str) -> list[int]:
    """Encode words separated by spaces."""
    return [VOCABULARY.index(word) for word in text.split()]
