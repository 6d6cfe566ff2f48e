"""Commands of the edge: they survive their way, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ldt
from ldt.runtime.control.command import Command

NUMBERS = st.one_of(st.floats(0.1, 1e6), st.just(float("inf")))


@given(
    st.builds(
        Command,
        st.sampled_from(["step", "eval", "zero_grad", "train", "save", "load", "stats", "close"]),
        update=st.booleans(),
        max_norm=st.none() | NUMBERS,
        norm_type=NUMBERS,
        lr=st.lists(st.floats(0, 10), max_size=3).map(tuple),
        autocast=st.sampled_from([None, "bfloat16", "float16"]),
        step=st.none() | st.integers(0, 10**12),
        keep=st.integers(1, 100),
        mode=st.booleans(),
    )
)
def test_commands_survive_their_way(command: Command) -> None:
    read = Command.from_bytes(command.to_bytes())
    for name in ("max_norm", "norm_type"):
        value, other = getattr(command, name), getattr(read, name)
        assert value is other is None or float(value) == float(other)
    names = ("name", "update", "step", "lr", "autocast")
    assert [getattr(read, name) for name in names] == [getattr(command, name) for name in names]


@given(
    st.one_of(
        st.binary(max_size=100),
        st.dictionaries(
            st.sampled_from(["name", "update", "step", "keep", "path", "max_norm"]),
            st.one_of(
                st.none(), st.integers(-5, 5), st.text(max_size=5), st.lists(st.integers(), max_size=2)
            ),
        ).map(lambda found: json.dumps(found).encode()),
    )
)
def test_anything_else_is_refused(data: bytes) -> None:
    with contextlib.suppress(ldt.LdtError):
        command = Command.from_bytes(data)
        assert command.name in ("step", "eval", "zero_grad", "train", "save", "load", "stats", "close")
        assert command.step is None or command.step >= 0


@pytest.mark.parametrize(
    "rates", [b"1234567", struct.pack("<d", float("nan")), struct.pack("<600d", *[1.0] * 600)]
)
def test_other_learning_rates_are_refused(rates: bytes) -> None:
    with pytest.raises(ldt.LdtError, match="this is not a command"):
        Command.from_bytes(b'{"name": "step"}\n' + rates)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "run"},
        {"name": "save", "path": "/etc"},
        {"name": "save", "step": -1},
        {"name": "step", "update": 1},
        {"name": "step", "lr": [0.1]},
        {"name": "step", "autocast": "float64"},
        {"name": "step", "max_norm": int("1" * 2000)},
    ],
)
def test_another_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ldt.LdtError, match="this is not a command"):
        Command.from_bytes(json.dumps(fields).encode())
