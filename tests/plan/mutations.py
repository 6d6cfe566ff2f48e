"""Random changes of JSON and text, like those of damage or an attacker."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

__all__ = ["HOSTILE", "mutated_json", "mutated_text"]

DEEP = 100_000
# Replace a value, or a whole file.
HOSTILE = [
    *(
        "",
        "null",
        "true",
        "[]",
        "{}",
        "0",
        "-1",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "-Infinity",
        '"text"',
        "1.5",
    ),
    *("9" * 5000, "-" + "9" * 5000, "9" * 30, "[" * DEEP, '{"a":' * DEEP, "[" * 150 + "]" * 150, "\ufeff{}"),
    *('{"a": 1, "a": 2}', "\x00", '"\\ud800"', "[1, 2", '{"format": null}', "[[[]]]", '{"": {}}'),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


_HOLE = "a hole for what is no JSON"


@st.composite
def mutated_json(draw: Callable[[Any], Any], text: str) -> str:
    """Return ``text`` with a value dropped, duplicated, replaced, nested or moved, or truncated."""
    if draw(st.integers(0, 9)) == 0:
        return text[: draw(st.integers(0, len(text) - 1))]
    value = copy.deepcopy(json.loads(text))
    *path, last = draw(st.sampled_from(list(_places(value))))
    parent = value
    for key in path:
        parent = parent[key]
    way = draw(st.sampled_from(["drop", "double", "replace", "nest", "other"]))
    hostile = ""
    if way == "drop":
        del parent[last]
    elif way == "double" and isinstance(parent, dict):
        parent[f"{last}2"] = parent[last]
    elif way == "double":
        parent.insert(last, parent[last])
    elif way == "nest":
        parent[last] = draw(st.sampled_from([[parent[last]], {"a": parent[last]}, [[parent[last]] * 2]]))
    elif way == "other":
        parent[last] = draw(
            st.sampled_from([parent, 10**6, 10**18, "tp=1 dp=999999 edge_dp=1 laps=1", "9.9", [[]]])
        )
        parent[last] = copy.deepcopy(parent[last]) if parent[last] is not parent else None
    else:
        parent[last] = _HOLE
        hostile = draw(st.sampled_from(HOSTILE))
    return json.dumps(value).replace(json.dumps(_HOLE), hostile)


@st.composite
def mutated_text(draw: Callable[[Any], Any], text: str) -> str:
    """Return ``text`` with a piece dropped, duplicated, or replaced by a number or a sign."""
    start = draw(st.integers(0, len(text) - 1))
    end = min(len(text), start + draw(st.integers(1, 12)))
    other = [
        "",
        text[start:end] * 2,
        "9",
        "999999",
        "-1",
        "9" * 5000,
        ",",
        "\n",
        " ",
        "=",
        ".",
        "\x00",
        "\ufeff",
        "e9",
    ]
    return text[:start] + draw(st.sampled_from(other)) + text[end:]
