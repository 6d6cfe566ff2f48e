"""ldt/_C.pyi and the compiled module have the same public names and signatures."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import ldt

pytest.importorskip("torch")

STUB = ast.parse((Path(ldt.__file__).parent / "_C.pyi").read_text(encoding="utf-8"))
# Members that pybind11 adds to every enum.
ENUM_MEMBERS = {"name", "value"}
# (name, kind, has a default) for each parameter
Signature = tuple[tuple[str, str, bool], ...]


def stub_members(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The definitions by public name (several for overloads). ``__init__`` counts as public."""
    members: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        if not name.startswith("_") or name == "__init__":
            members.setdefault(name, []).append(node)
    return members


def module_members(owner: Any) -> set[str]:
    names = {name for name in vars(owner) if not name.startswith("_")}
    if hasattr(owner, "__members__"):
        names -= ENUM_MEMBERS
    return names


def stub_signature(function: ast.FunctionDef) -> Signature:
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    first_default = len(positional) - len(arguments.defaults)
    found = [
        (argument.arg, "positional", index >= first_default) for index, argument in enumerate(positional)
    ]
    found += [("*" + argument.arg, "variadic", False) for argument in [arguments.vararg] if argument]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "keyword", default is not None))
    found += [("**" + argument.arg, "variadic", False) for argument in [arguments.kwarg] if argument]
    return tuple(entry for entry in found if entry[0] != "self")


def module_signatures(function: Any, name: str) -> list[Signature]:
    """Parse the docstring that pybind11 writes: ``name(self: T, x: int = 0) -> None``, numbered if overloaded."""
    signatures = []
    for line in (function.__doc__ or "").splitlines():
        text = line.split(". ", 1)[1] if line[:1].isdigit() and ". " in line else line
        if not text.startswith(f"{name}(") or text.startswith(f"{name}(*args, **kwargs)"):
            continue
        parsed = ast.parse(f"def {text}: ...").body[0]
        assert isinstance(parsed, ast.FunctionDef)
        signatures.append(stub_signature(parsed))
    return signatures


def compare_functions(where: str, definitions: list[ast.stmt], function: Any, name: str) -> list[str]:
    declared = [stub_signature(node) for node in definitions if isinstance(node, ast.FunctionDef)]
    actual = module_signatures(function, name)
    if sorted(declared) == sorted(actual):
        return []
    return [f"{where}: the stub has {declared}, the module {actual}"]


def is_property(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(
        getattr(decorator, "id", getattr(decorator, "attr", "")) in ("property", "setter")
        for decorator in decorators
    )


def differences(where: str, body: list[ast.stmt], owner: Any) -> list[str]:
    """The differences between a scope of the stub and the real object."""
    declared, actual = stub_members(body), module_members(owner)
    found = [f"{where}.{name} is in the module, not in the stub" for name in sorted(actual - set(declared))]
    missing = {name for name in set(declared) - actual if name != "__init__"}
    found += [f"{where}.{name} is in the stub, not in the module" for name in sorted(missing)]
    for name, definitions in declared.items():
        if name in missing:
            continue
        value, path, first = getattr(owner, name), f"{where}.{name}", definitions[0]
        if isinstance(first, ast.ClassDef):
            if isinstance(value, type):
                found += differences(path, first.body, value)
            else:
                found.append(f"{path} is a class in the stub, not in the module")
        elif isinstance(first, ast.FunctionDef) and not is_property(first):
            found += compare_functions(path, definitions, value, name)
        elif callable(value) and not isinstance(value, type):
            found.append(f"{path} is a function in the module, not in the stub")
    return found


def test_stub_and_module_agree() -> None:
    module = importlib.import_module("ldt._C")
    assert differences("ldt._C", STUB.body, module) == []


def test_bases_of_stub_classes_are_real() -> None:
    module = importlib.import_module("ldt._C")
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            declared = {ast.unparse(base).split(".")[-1] for base in node.bases}
            names = {base.__name__ for base in getattr(module, node.name).__mro__}
            assert declared <= names, f"{node.name}: the stub has bases {declared}, the module {names}"


@pytest.mark.parametrize(
    ("stub", "expected"),
    [
        ("def abort_all(reason: str) -> None: ...", 0),
        ("def abort_all(reason: str = '') -> None: ...", 1),
        ("def abort_all(why: str) -> None: ...", 1),
        ("def abort_all(*, reason: str) -> None: ...", 1),
        ("abort_all: int", 1),
        ("class abort_all: ...", 1),
        ("def abort_all(reason: str) -> None: ...\ndef more() -> None: ...", 1),
        ("", 1),
    ],
)
def test_the_check_detects_differences(stub: str, expected: int) -> None:
    def abort_all() -> None: ...

    abort_all.__doc__ = "abort_all(reason: str) -> None\n"
    module = type("module", (), {"abort_all": staticmethod(abort_all)})
    assert len(differences("module", ast.parse(stub).body, module)) == expected
