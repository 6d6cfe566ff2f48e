"""Writes a job as a standalone script, with copies of everything that it uses of this package."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType

from differential import (
    differences,
    dtypes,
    functions,
    layers,
    model,
    ranks,
    reference,
    replica,
    side_tensors,
    slow_lanes,
    spec,
    stateful,
)
from differential import job as running
from differential.compare import Verdict
from differential.spec import Job

__all__ = ["script_of"]

_PARTS = (layers, side_tensors, stateful, functions, dtypes, ranks)
_REST = (model, replica, reference, slow_lanes, running, differences)
_ALWAYS = {"Part"}
_MAIN = '''
def main() -> None:
    """Says on every rank what it raised, and on the first where values differ from the unsplit model's."""
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    (ending,) = run_jobs([JOB], Path(folder[0]))
    if ending.raised is not None:
        print(f"rank {dist.get_rank()}, call {ending.raised.call}: {ending.raised.kind}: {ending.raised.text}")
    endings = [None] * dist.get_world_size()
    dist.all_gather_object(endings, ending)
    if dist.get_rank() == 0:
        right = reference(JOB)
        lines = [
            f"rank {rank}, call {call}: {line}"
            for rank, ending in enumerate(endings)
            for call, (actual, expected) in enumerate(zip(ending.records, right[ending.node]))
            for line in differences(JOB, actual, expected)
        ]
        print("\\n".join(lines) or "nothing that was computed differs from the unsplit model")
    dist.destroy_process_group()


main()
'''


def script_of(job: Job, verdict: Verdict) -> str:
    """Return Python source, to be run by torchrun."""
    kinds = {item.kind for chunk in job.chunks for item in chunk}
    imports: dict[str, None] = {}
    body: list[str] = []
    for module in (spec, *_PARTS, *_REST):
        wanted = kinds | _ALWAYS if module in _PARTS else None
        for node, text in _pieces(module, wanted):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports[text] = None
            else:
                body.append(text)
    names = ", ".join(f'"{kind}": {kind}' for kind in sorted(kinds))
    size = job.topology.world_size
    run = f"Run: torchrun --standalone --nproc-per-node {size} <this file>"
    head = f'"""{_plain(verdict.name)}. {run}\n\n{_plain(verdict.text)}\n"""'
    first = ["from __future__ import annotations", "import tempfile", *imports]
    code = "\n\n\n".join(body).replace(_table_of_parts(), f"PARTS = {{{names}}}")
    return f"{head}\n\n" + "\n".join(first) + f"\n\n{code}\n\n\nJOB = {job!r}\n\n{_MAIN}"


def _pieces(module: ModuleType, wanted: Iterable[str] | None) -> Iterator[tuple[ast.stmt, str]]:
    """Return a module's external imports and definitions; only the ``wanted`` classes, with their dependencies."""
    source = inspect.getsource(module)
    nodes = [node for node in ast.parse(source).body if not _is_own(node)]
    texts = {id(node): _text(source, node) for node in nodes}
    classes = {node.name: texts[id(node)] for node in nodes if isinstance(node, ast.ClassDef)}
    needed = None if wanted is None else {name for name in classes if name in wanted}
    if needed is not None:
        needed |= {name for name in classes if any(name in classes[other] for other in needed)}
    for node in nodes:
        if not isinstance(node, ast.ClassDef) or needed is None or node.name in needed:
            yield node, texts[id(node)]


def _is_own(node: ast.stmt) -> bool:
    """Whether it is a docstring, ``__all__``, or an import of this package or of ``__future__``."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in ("differential", "__future__")
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr)


def _text(source: str, node: ast.stmt) -> str:
    """Return the source with decorators."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _table_of_parts() -> str:
    source = inspect.getsource(model)
    table = next(node for node in ast.parse(source).body if ast.unparse(node).startswith("PARTS"))
    return _text(source, table)


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")[:1500]
