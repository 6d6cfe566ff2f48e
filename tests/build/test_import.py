"""Plans import without torch; if torch and ldt._C do not match, the import fails with one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ldt
from ldt import _torch_abi

ROOT = Path(ldt.__file__).parents[1]
# Importing torch or the compiled module in the child is an error.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "matplotlib") or name == "ldt._C":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""
# A stand-in for torch of another minor version.
OTHER_TORCH = (
    "import sys, types; torch = sys.modules['torch'] = types.ModuleType('torch')\n"
    "torch.__version__ = '2.7.1'\n"
)
# Pretends that the module is built, whatever the state of this source tree.
BUILT = (
    "import sys, types; info = sys.modules['ldt._build_info'] = types.ModuleType('ldt._build_info')\n"
    "info.TORCH_VERSION = '2.13.0+cpu'\n"
)


def child(program: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_plans_work_without_torch() -> None:
    program = """
import ldt, ldt.plan, ldt.topology
from ldt import PlanError, RemoteStageError, Topology
plan = ldt.plan.ushape(Topology(tp=[1, 1, 1]), num_microbatches=4)
assert ldt.plan.Plan.from_text(plan.to_text()) == plan
assert not any(name.split(".")[0] == "torch" for name in sys.modules)
assert "Pipeline" in dir(ldt) and ldt.__version__
"""
    done = child(BLOCK + program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["connect", "Mesh", "Pipeline", "StepResult", "LaneError", "clip_grad_norm_"]
)
def test_names_that_need_torch_say_so(name: str) -> None:
    done = child(f"{BLOCK}{BUILT}from ldt import {name}")
    assert done.returncode == 1
    assert last_line(done) == ("ImportError: ldt needs torch==2.13.*, and no torch is installed: install it.")


@pytest.mark.parametrize(
    "statement", ["from ldt import Pipeline", "import ldt; ldt.connect", "import ldt._C"]
)
def test_another_minor_version_of_torch(statement: str) -> None:
    done = child(OTHER_TORCH + BUILT + statement)
    assert done.returncode == 1
    assert re.fullmatch(
        r"ImportError: ldt was built against torch 2\.13\.0\+cpu, but torch 2\.7\.1 is installed: "
        r"rebuild ldt with .*, or install torch 2\.13\.\*\.",
        last_line(done),
    )


def test_never_built() -> None:
    program = "import sys; sys.modules['ldt._build_info'] = None\nfrom ldt import Pipeline"
    done = child(program)
    assert done.returncode == 1
    assert last_line(done).startswith(
        "ImportError: ldt's compiled module was not built here: run `pip install"
    )


@pytest.mark.parametrize(
    ("built", "installed", "fits"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("2.13.0+cpu", "2.13.2+cu130", True),
        ("2.13.0", "2.14.0", False),
        ("2.1.0", "2.13.0", False),
        ("2.13.0", "3.13.0", False),
    ],
)
def test_only_the_minor_version_counts(built: str, installed: str, fits: bool) -> None:
    assert (_torch_abi.mismatch(built, installed) is None) == fits


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'piepline'"):
        ldt.piepline  # noqa: B018


def test_every_public_name_can_be_loaded() -> None:
    pytest.importorskip("torch")
    for name in ldt.__all__:
        assert getattr(ldt, name) is not None
