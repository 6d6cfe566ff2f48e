"""Quantities such as 20ms and 1Gbit are parsed, and errors name those that are not."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from ldt.cli.units import bandwidth, nbytes, one_or_more, seconds

GOOD: list[tuple[Callable[[str], float], str, float]] = [
    (seconds, "20ms", 0.02),
    (seconds, " 1.5 s", 1.5),
    (seconds, "300us", 3e-4),
    (seconds, "7µs", 7e-6),
    (seconds, "2min", 120.0),
    (seconds, "1e-3s", 1e-3),
    (seconds, "0", 0.0),
    (bandwidth, "1Gbit", 125e6),
    (bandwidth, "10Gbit/s", 1.25e9),
    (bandwidth, "10Gbps", 1.25e9),
    (bandwidth, "10Gb/s", 1.25e9),
    (bandwidth, "125MB/s", 125e6),
    (bandwidth, "100MiB/s", 104857600.0),
    (bandwidth, "1.5Tbit", 187.5e9),
    (nbytes, "64MiB", 67108864),
    (nbytes, "16 kB", 16000),
    (nbytes, "4096", 4096),
    (nbytes, ".5GiB", 536870912),
]


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_what_people_write(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


BAD = [
    (
        seconds,
        ["20", "20mS", "ms", "-1ms", "1ms2", "nan s", "inf s", "1e999s", "", "20Gbit", "٣ms"],
        "such as 20ms",
    ),
    (bandwidth, ["1", "0", "1G", "1gbit", "1GBit", "fast", "-1Gbit", "20ms"], "such as 1Gbit or 125MB/s"),
    (nbytes, ["64mib", "64M", "1GiB/s", "-4", "x"], "such as 64MiB"),
]


@pytest.mark.parametrize(
    ("parse", "text", "hint"), [(parse, text, hint) for parse, texts, hint in BAD for text in texts]
)
def test_what_is_refused_comes_with_an_example(parse: Callable[[str], float], text: str, hint: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        parse(text)
    assert hint in str(caught.value) or "must be above 0" in str(caught.value)
    assert repr(text) in str(caught.value)


def test_one_or_a_list() -> None:
    parse = one_or_more(seconds)
    assert parse("12ms") == pytest.approx(0.012)
    assert parse("1ms,2s,0") == pytest.approx([0.001, 2.0, 0.0])
    with pytest.raises(ArgumentTypeError):
        parse("1ms,,2ms")
