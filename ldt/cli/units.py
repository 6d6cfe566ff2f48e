"""Parses quantities such as 20ms, 1Gbit and 64MiB. Each function is an ``argparse`` type."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping

__all__ = ["bandwidth", "limit", "nbytes", "one_or_more", "seconds"]

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in {**_PREFIXES, **_BINARY}.items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in {**_PREFIXES, **_BINARY}.items()}
_RATES = {**_BYTES, **_BITS, **{f"{prefix}b": factor / 8 for prefix, factor in _PREFIXES.items() if prefix}}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)((?:e[+-]?[0-9]+)?)\s*([^\s0-9]*)", re.ASCII)


def seconds(text: str) -> float:
    """Parse "20ms", "1.5 s" or "300us" into seconds. A number other than 0 needs a unit."""
    return _quantity(text, _SECONDS, "a time", "20ms")


def limit(text: str) -> float:
    """Parse a number of seconds above 0, without a unit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return value


def bandwidth(text: str) -> float:
    """Parse "1Gbit", "10Gb/s" or "100MiB/s" into bytes per second: "bit" or "b" means bits, "B" bytes."""
    rate = _quantity(re.sub("(/s|ps)$", "", text.strip()), _RATES, "a bandwidth", "1Gbit or 125MB/s", text)
    if rate == 0:
        raise argparse.ArgumentTypeError(f"a bandwidth must be above 0, got {text!r}")
    return rate


def nbytes(text: str) -> int:
    """Parse "64MiB", "16 kB" or "4096" into bytes."""
    return round(_quantity(text, {"": 1.0, **_BYTES}, "a size", "64MiB"))


def one_or_more(parse: Callable[[str], float]) -> Callable[[str], float | list[float]]:
    """Return a type for one value ("12ms") or a list of values ("3ms,12ms,12ms")."""

    def parse_list(text: str) -> float | list[float]:
        values = [parse(part) for part in text.split(",")]
        return values if "," in text else values[0]

    return parse_list


def _quantity(
    text: str, units: Mapping[str, float], what: str, example: str, shown: str | None = None
) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    factor = units.get(match[3]) if match else None
    if match and not match[3] and float(match[1]) == 0:
        factor = 1.0
    if match is None or factor is None or not math.isfinite(float(match[1] + match[2]) * factor):
        known = ", ".join(unit for unit in units if unit)
        raise argparse.ArgumentTypeError(
            f"expected {what} such as {example}, got {text if shown is None else shown!r} (units: {known})"
        )
    return float(match[1] + match[2]) * factor
