"""The reference documents every public name, and no others."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

pytest.importorskip("torch")

from pages import ROOT, pages, read

MODULES = (
    "ldt",
    "ldt.plan",
    "ldt.topology",
    "ldt.runtime",
    "ldt.testing",
    "ldt.integrations.hf",
    "ldt.integrations.lightning",
    "ldt.integrations.pipelining",
)
IN_TEXT = {  # documented under another name, in a sentence
    "ldt.__version__",
    "ldt.plan",
    "ldt.Node",
    "ldt.Topology",
    "ldt.plan.PlanError",
    *(
        f"ldt.runtime.{name}"
        for name in (
            "Mesh",
            "Observer",
            "Pipeline",
            "Profile",
            "StepResult",
            "add_loss",
            "connect",
            "keep",
            "scalars",
        )
    ),
}
REFERENCE = [page for page in pages() if page.startswith("docs/reference/")]
TEXT = "\n".join(read(page) for page in REFERENCE)
DOCUMENTED = set(re.findall(r"^::: ([\w.]+)$", TEXT, re.MULTILINE))


def public_names(module: str) -> set[str]:
    if module in (
        "ldt.integrations.hf",
        "ldt.integrations.lightning",
    ):  # not imported: they take long to import
        file = ROOT / module.replace(".", "/") / "__init__.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found = next(node.value for node in tree.body if isinstance(node, ast.Assign))
        names = ast.literal_eval(found)
    else:
        names = importlib.import_module(module).__all__
    return {f"{module}.{name}" for name in names}


def test_every_public_name_is_documented_once() -> None:
    public = set().union(*map(public_names, MODULES))
    assert public - IN_TEXT == DOCUMENTED
    assert len(re.findall(r"^::: ", TEXT, re.MULTILINE)) == len(DOCUMENTED)
    for name in IN_TEXT - {"ldt.plan"}:
        assert f"`{name}`" in TEXT, name


@pytest.mark.parametrize("name", ["Mesh", "Pipeline"])
def test_members_that_are_listed_exist(name: str) -> None:
    ldt = importlib.import_module("ldt")
    match = re.search(
        rf"^::: ldt\.{name}\n    options:\n      members:\n((?: +- \w+\n)+)", TEXT, re.MULTILINE
    )
    assert match is not None
    for member in re.findall(r"\w+", match.group(1)):
        assert getattr(ldt, name).__dict__.get(member, None) is not None, member
        assert getattr(getattr(ldt, name), member).__doc__ or member in ("mesh", "failed"), member
