"""Data from a peer cannot run code: by their syntax trees, no module unpickles, evaluates or listens."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import ldt

PACKAGE = Path(ldt.__file__).parent
# Reads the metadata of torch.distributed.checkpoint from a disk, with an allowlist of classes.
UNPICKLERS = {"train/checkpoint/rank_metadata.py"}
MODULES = {"_pickle", "cloudpickle", "code", "dill", "joblib", "marshal", "pickle", "shelve", "socketserver"}
BUILTINS = {"__import__", "compile", "eval", "exec"}
# In torch, a model's file and object collectives use pickle.
OF_TORCH = {"torch.load", "torch.save", "torch.hub.load", "torch.serialization.load", "torch.jit.load"}
OBJECTS = {name for name in dir(dist) if "_object" in name} | {"_tensor_to_object", "_object_to_tensor"}
METHODS = {"listen", "bind", "create_server", "start_server"}


def dangers(source: str) -> Iterator[str]:
    """Yield line and name of each call that may run its input as code, or opens a port."""
    for node in ast.walk(ast.parse(source)):
        for name in names_in(node):
            yield f"{getattr(node, 'lineno', 0)}: {name}"


def names_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases if alias.name.split(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module), names=aliases):
            whole = [module, *(f"{module}.{alias.name}" for alias in aliases)]
            yield from (name for name in whole if name.split(".")[0] in MODULES or name in OF_TORCH)
            yield from (alias.name for alias in aliases if alias.name in OBJECTS)
        case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
            yield name
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in METHODS:
            if not ast.unparse(owner).endswith("_signature"):  # which is bound to arguments, not to a port
                yield name
        case ast.Attribute(attr=name) if name in OBJECTS or ast.unparse(node) in OF_TORCH:
            yield ast.unparse(node)
        case ast.keyword(arg="allow_pickle" | "weights_only"):
            yield str(node.arg)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, marshal as m",
        "from pickle import loads",
        "def f(x):\n    import cloudpickle.cloudpickle",
        "from torch import load",
        "import torch\nread = torch.load",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list as tell",
        "eval(text)",
        "server.bind(('', 0))",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_dangers_are_found(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source", ["pipeline.eval(batch)", "re.compile('x')", "json.loads(text)", "ctypes.py_object(x)"]
)
def test_harmless_code_is_not_flagged(source: str) -> None:
    assert not list(dangers(source))


def test_no_module_runs_received_code() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("testing/") and name not in UNPICKLERS:
            found[name] = list(dangers(path.read_text(encoding="utf-8")))
    assert len(found) > 80
    # A rank while it connects (see test_ports.py); launchers, and python -m ldt doctor --link.
    for name in ("runtime/comm/socket_dial.py", "launch/reach.py"):
        assert {line.split(": ")[1] for line in found.pop(name)} == {"create_server"}
    assert {name: lines for name, lines in found.items() if lines} == {}
