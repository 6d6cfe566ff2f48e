"""The layers of csrc: folders include only lower ones, and torch's undocumented names stay in two headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)

# The folders that each folder may include besides itself, from bottom to top: it names only earlier lines.
CORE = ("metadata/format", "metadata/host", "metadata/codec")
LAYERS = {
    "common": (),
    "memory": ("common",),
    "compression": ("common",),
    "sockets": ("common",),
    "process_group": ("common", "sockets"),
    "copy_engine": ("common", "memory"),
    "host_links": ("common", "memory", "sockets", "copy_engine"),
    "transports": ("common", "memory", "process_group", "copy_engine"),
    "lanes": ("common", "memory", "process_group", "copy_engine", "transports"),
    "metadata/format": (),
    "metadata/host": CORE[:1],
    "metadata/codec": CORE[:2],
    "metadata/device": ("common", *CORE),
    "metadata": ("common", *CORE, "metadata/device"),
    "bindings": (
        "common",
        "memory",
        "compression",
        "copy_engine",
        "host_links",
        "transports",
        "lanes",
        "metadata/format",
        "metadata/device",
        "metadata",
    ),
}
TORCH = re.compile(r"ATen|c10|torch|cuda")
PYTHON = re.compile(r"Python\.h|pybind11|torch/(extension|python)\.h|torch/csrc/(?!distributed/|api/)")
PRIVATE_NAMES = re.compile(
    r"\b(?:at|c10|torch)::(?:impl|detail|native)::|\bat::_\w+|[uU]nsafe\w*\(|\bTHP\w+"
    r"|\bmake_storage_impl\b|\bInefficientStdFunctionContext\b|\bhas_internal_overlap\b"
    r"|\bDispatchKey::Python\b|\bVariableVersion\b|(?:\.|->)_[a-z]\w*\("
)
ROOMS_OF_PRIVATE_NAMES = {"common/torch_private.h", "bindings/torch_python.h"}


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def folder_of(name: str) -> str:
    """The layer of a file: the longest folder of LAYERS that contains it, or its own folder if there is none."""
    parents = [str(parent) for parent in Path(name).parents]
    return next((parent for parent in parents if parent in LAYERS), parents[0])


def violations(root: Path) -> Iterator[str]:
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        for own, foreign in INCLUDE.findall(path.read_text(encoding="utf-8")):
            yield from _of_include(root, name, own) if own else _of_foreign_include(name, foreign)


def _of_foreign_include(name: str, header: str) -> Iterator[str]:
    folder = folder_of(name)
    if folder in CORE and TORCH.match(header):
        yield f"csrc/{name} includes <{header}>, and {folder} knows no torch"
    elif folder != "bindings" and PYTHON.match(header):
        yield f"csrc/{name} includes <{header}>, and only bindings know Python"


def _of_include(root: Path, name: str, included: str) -> Iterator[str]:
    here, there = folder_of(name), folder_of(included)
    if not (root / included).is_file():
        yield f'csrc/{name} includes "{included}", which is no file of csrc'
    elif here not in LAYERS or there not in LAYERS:
        yield f"csrc/{name} includes csrc/{included}: {there if here in LAYERS else here} is no layer"
    elif there not in (here, *LAYERS[here]):
        yield f"csrc/{name} includes csrc/{included}: {here} must not use {there}"


def test_the_layers_have_no_circle() -> None:
    folders = list(LAYERS)
    for folder, used in LAYERS.items():
        assert all(folders.index(below) < folders.index(folder) for below in used), folder


def test_includes_go_down_only() -> None:
    assert len(sources(CSRC)) > 100
    assert list(violations(CSRC)) == []


@pytest.mark.parametrize(
    "code", ["at::_foreach_copy_(a, b);", "t.unsafeGetTensorImpl();", "t._neg_view();", "c10::impl::x()"]
)
def test_an_undocumented_name_is_found(code: str) -> None:
    assert PRIVATE_NAMES.search(code)


def test_undocumented_names_of_torch_are_in_their_headers() -> None:
    found = [
        f"csrc/{name}: {match.group(0)}"
        for path in sources(CSRC)
        if (name := path.relative_to(CSRC).as_posix()) not in ROOMS_OF_PRIVATE_NAMES
        for match in PRIVATE_NAMES.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


WRONG = {
    ("lanes/lane.h", '#include "bindings/bindings.h"'): "lanes must not use bindings",
    ("memory/pool.h", '#include "process_group/comm.h"'): "memory must not use process_group",
    ("lanes/lane.h", '#include "common/nothing.h"'): "which is no file of csrc",
    ("other/new.h", '#include "common/error.h"'): "other is no layer",
    ("metadata/codec/reader.h", "#include <ATen/ATen.h>"): "knows no torch",
    ("lanes/lane.h", "#include <pybind11/stl.h>"): "only bindings know Python",
    ("lanes/lane.h", "#include <torch/extension.h>"): "only bindings know Python",
    ("metadata/pack.h", '#include "memory/pool.h"'): "metadata must not use memory",
}


@pytest.mark.parametrize(("name", "line", "expected"), [(*wrong, text) for wrong, text in WRONG.items()])
def test_a_wrong_include_is_reported_with_both_files(
    tmp_path: Path, name: str, line: str, expected: str
) -> None:
    others = ("bindings/bindings.h", "process_group/comm.h", "common/error.h", "memory/pool.h")
    for path, text in {**dict.fromkeys(others, ""), name: line}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (found,) = violations(tmp_path)
    assert found.startswith(f"csrc/{name} includes ")
    assert expected in found
