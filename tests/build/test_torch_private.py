"""Private names of PyTorch are used in one module, which gives the reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ldt

PACKAGE = Path(ldt.__file__).parent
THE_MODULE = PACKAGE / "_torch_private.py"
# Names of other packages, of PyTorch but documented in its notes, and of namedtuples.
ALLOWED = {
    *("_ArgumentGroup", "_current_frames", "_asdict", "_replace", "_fields", "_make"),
    *("_from_config", "_init_weights", "_keys_to_ignore_on_load_unexpected"),  # of transformers
    *("_version", "_parameters", "_buffers", "_modules"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Names that classes and functions of the package define or set on themselves."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    found.add(name)
    return found


def uses(source: str, own: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name, lineno=line) if is_private(name) and name not in own | ALLOWED:
                yield f"{line}: {name}"
            case ast.ImportFrom(module=str(module), names=names, lineno=line) if module.startswith("torch"):
                parts = [*module.split("."), *(alias.name for alias in names)]
                yield from (f"{line}: {module} {part}" for part in parts if is_private(part))
            case ast.Import(names=names, lineno=line):
                yield from (
                    f"{line}: {a.name}" for a in names if "._" in a.name and a.name.startswith("torch")
                )


@pytest.mark.parametrize(
    "source",
    [
        "group._get_backend(device)",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "import torch._C",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(uses(source, set()))


def test_no_other_module_uses_private_names_of_torch() -> None:
    own = own_names()
    found = [
        f"{path.relative_to(PACKAGE)}:{use}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != THE_MODULE
        for use in uses(path.read_text(encoding="utf-8"), own)
    ]
    assert not found, "use ldt._torch_private:\n" + "\n".join(found)
