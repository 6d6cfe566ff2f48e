"""The layers of csrc: a folder includes only what stands below it, and names that torch does not document have one room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)

# From bottom to top. A folder of one line does not include another of it.
LAYERS = (
    ("metadata/format",),
    ("metadata/host",),
    ("metadata/codec",),
    ("common",),
    ("memory", "process_group", "metadata/device"),
    ("copy_engine", "metadata"),
    ("transports",),
    ("lanes",),
    ("bindings",),
)
LEVEL = {folder: level for level, row in enumerate(LAYERS) for folder in row}

# Folders with fewer neighbours than their height allows.
ONLY = {
    "common": {"common"},
    "metadata/host": {"metadata/host", "metadata/format"},
    "metadata/codec": {"metadata/codec", "metadata/host", "metadata/format"},
    "metadata/device": {"common", "metadata/format", "metadata/host", "metadata/codec", "metadata/device"},
    "metadata": {"common", "metadata/format", "metadata/host", "metadata/codec", "metadata/device", "metadata"},
}
WITHOUT_TORCH = {"metadata/format", "metadata/host", "metadata/codec"}
PRIVATE_NAMES = re.compile(r"\b(?:at|c10|torch)::(?:impl|detail|native)::|\bat::_\w+|[uU]nsafe\w*\(|\bTHP\w+")
ROOMS_OF_PRIVATE_NAMES = {"common/torch_private.h", "bindings/torch_python.h"}


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def folder_of(name: str) -> str:
    """The layer of a file: the longest folder of LAYERS that it lies in, or its own folder if there is none."""
    parents = [str(parent) for parent in Path(name).parents]
    return next((parent for parent in parents if parent in LEVEL), parents[0])


def violations(root: Path) -> Iterator[str]:
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        for own, foreign in INCLUDE.findall(text):
            if own:
                yield from _of_include(root, name, own)
            elif folder_of(name) in WITHOUT_TORCH and re.match(r"ATen|c10|torch|cuda", foreign):
                yield f"csrc/{name} includes <{foreign}>, and {folder_of(name)} knows no torch"
            elif folder_of(name) != "bindings" and re.match(r"Python\.h|pybind11|torch/csrc/(utils|autograd/python)", foreign):
                yield f"csrc/{name} includes <{foreign}>, and only bindings know Python"


def _of_include(root: Path, name: str, included: str) -> Iterator[str]:
    here, there = folder_of(name), folder_of(included)
    if not (root / included).is_file():
        yield f'csrc/{name} includes "{included}", which is no file of csrc'
    elif here not in LEVEL or there not in LEVEL:
        yield f"csrc/{name} includes csrc/{included}: {here if here not in LEVEL else there} is no layer"
    elif here != there and LEVEL[there] >= LEVEL[here]:
        yield f"csrc/{name} includes csrc/{included}: {there} is not below {here}"
    elif there not in ONLY.get(here, {there}):
        yield f"csrc/{name} includes csrc/{included}: {here} does not use {there}"


def test_includes_go_down_only() -> None:
    assert len(sources(CSRC)) > 100
    assert list(violations(CSRC)) == []


def test_undocumented_names_of_torch_have_one_room() -> None:
    found = [
        f"csrc/{name}: {match.group(0)}"
        for path in sources(CSRC)
        if (name := path.relative_to(CSRC).as_posix()) not in ROOMS_OF_PRIVATE_NAMES
        for match in PRIVATE_NAMES.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "name, line, expected",
    [
        ("lanes/lane.h", '#include "bindings/bindings.h"', "bindings is not below lanes"),
        ("memory/pool.h", '#include "process_group/comm.h"', "process_group is not below memory"),
        ("lanes/lane.h", '#include "common/nothing.h"', "which is no file of csrc"),
        ("other/new.h", '#include "common/error.h"', "other is no layer"),
        ("metadata/codec/a.h", '#include <ATen/ATen.h>', "knows no torch"),
        ("lanes/lane.h", '#include <pybind11/stl.h>', "only bindings know Python"),
        ("metadata/pack.h", '#include "memory/pool.h"', "metadata does not use memory"),
    ],
)  # fmt: skip
def test_a_wrong_include_is_named_with_both_files(tmp_path: Path, name: str, line: str, expected: str) -> None:
    files = {"bindings/bindings.h": "", "process_group/comm.h": "", "common/error.h": "", "memory/pool.h": "", name: line}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (found,) = violations(tmp_path)
    assert found.startswith(f"csrc/{name} includes ") and expected in found
