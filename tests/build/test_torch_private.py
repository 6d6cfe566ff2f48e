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
    *("_ArgumentGroup", "_current_frames", "_exit", "_asdict", "_replace", "_fields", "_make"),
    *("_from_config", "_init_weights", "_keys_to_ignore_on_load_unexpected"),  # of transformers
    *("_get_num_items_in_batch", "_n_gpu", "_prepare_inputs", "_reset_state"),  # of its Trainer and accelerate
    *("_version", "_parameters", "_buffers", "_modules"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """Names that the classes and functions of a file define, or set on themselves."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return found


def uses(source: str) -> Iterator[str]:
    """Line and name of each private name that the file does not define itself."""
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
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
        "group._backend = None\ngroup._backend",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(uses(source))


def test_the_search_leaves_out_names_of_the_file() -> None:
    assert not list(
        uses("class A:\n    def _f(self):\n        self._x = 1\n        return self._f, other._x")
    )


def test_no_other_module_uses_private_names_of_torch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{use}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != THE_MODULE
        for use in uses(path.read_text(encoding="utf-8"))
    ]
    assert not found, "use ldt._torch_private:\n" + "\n".join(found)
