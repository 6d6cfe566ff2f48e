"""Parses numbers of the command line; a wrong one ends the program with one sentence."""

from __future__ import annotations

import argparse
import math

__all__ = ["count", "count_or_zero", "positive", "positive_or_zero"]


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def positive_or_zero(text: str) -> float:
    """A finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
