"""The build backend finds the target's torch as text, never imports or requires it, and fails with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build_backend"))

import find_setuptools  # noqa: E402
import find_torch  # noqa: E402
import ldt_build_backend  # noqa: E402
import native_tools  # noqa: E402

STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
VERSION_PY = "from typing import Optional\n__version__ = '2.13.1+cu130'\nraise RuntimeError('imported')\n"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment as an isolated build sees it: only sys.prefix points to it. Returns its site-packages."""
    packages = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(
        sys,
        "path",
        [entry for entry in sys.path if entry.startswith(STDLIB) and "site-packages" not in entry],
    )
    monkeypatch.delenv("LDT_TORCH_DIR", raising=False)
    return packages


def add_torch(packages: Path, version_py: str = VERSION_PY) -> Path:
    (packages / "torch").mkdir()
    (packages / "torch" / "version.py").write_text(version_py)
    return packages / "torch"


def test_torch_of_the_target_is_found_as_text(environment: Path) -> None:
    folder = add_torch(environment)
    torch = find_torch.find_torch()
    assert torch == (folder, "2.13.1+cu130")
    assert torch.requirement == "torch==2.13.*"


def test_sys_path_comes_first(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch(environment)
    (tmp_path / "other").mkdir()
    folder = add_torch(tmp_path / "other", '__version__: str = "2.11.0"\n')
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other")])
    assert find_torch.find_torch() == (folder, "2.11.0")


def test_override(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch(environment)
    monkeypatch.setenv("LDT_TORCH_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"LDT_TORCH_DIR is .*nowhere"):
        find_torch.find_torch()


def test_no_torch_fails_in_every_hook_that_leads_to_a_wheel(environment: Path) -> None:
    folder = str(environment)
    for hook in (
        ldt_build_backend.get_requires_for_build_wheel,
        ldt_build_backend.get_requires_for_build_editable,
        lambda: ldt_build_backend.prepare_metadata_for_build_wheel(folder),
        lambda: ldt_build_backend.prepare_metadata_for_build_editable(folder),
        lambda: ldt_build_backend.build_wheel(folder),
        lambda: ldt_build_backend.build_editable(folder),
    ):
        with pytest.raises(SystemExit, match=r"there is no torch in .*install torch"):
            hook()
    assert list(environment.iterdir()) == []


def test_torch_is_never_a_build_requirement(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch(environment)
    monkeypatch.setattr(native_tools, "find_tool", lambda name: None)
    wanted = ["setuptools>=77", "cmake>=3.25", "ninja>=1.10"]
    assert ldt_build_backend.get_requires_for_build_wheel() == wanted
    assert ldt_build_backend.get_requires_for_build_sdist() == ["setuptools>=77"]


@pytest.mark.parametrize(
    ("version", "missing"), [("77.0.1", []), ("81.0.0", []), ("66.1.1", ["setuptools>=77"])]
)
def test_setuptools_of_the_target_is_used(
    version: str, missing: list[str], environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An isolated build requires none, and so no network, if the target has a suitable one."""
    (environment / "setuptools.dist-info").mkdir()
    (environment / "setuptools.dist-info" / "METADATA").write_text(f"Name: setuptools\nVersion: {version}\n")
    assert ldt_build_backend.get_requires_for_build_sdist() == missing
    if missing:
        with pytest.raises(SystemExit, match=r"needs setuptools >= 77; run `pip install 'setuptools>=77'`"):
            find_setuptools.require_setuptools()
    else:
        find_setuptools.require_setuptools()
        assert sys.path[-1] == str(environment)


def test_a_broken_program_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (
        ("broken", "exit 1"),
        ("old", "echo cmake version 3.5.1"),
        ("good", "echo cmake version 3.31"),
    ):
        program = tmp_path / name / "cmake"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("broken", "old", "good")))
    assert native_tools.find_tool("cmake") == str(tmp_path / "good" / "cmake")


def test_a_frontend_shows_only_the_sentence(tmp_path: Path) -> None:
    """Run the hook as pip does, in a bare interpreter that has no torch: one line, status 1, no traceback."""
    program = "import sys; sys.path[:0] = [sys.argv[1]]; import ldt_build_backend as b; b.build_wheel('.')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(ROOT / "build_backend")],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "LDT_TORCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ldt: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_tool_inside_a_package_of_the_target_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PATH has only the script of the package, which an isolated build cannot run."""
    script = tmp_path / "bin" / "cmake"
    tool = tmp_path / "target" / "cmake" / "data" / "bin" / "cmake"
    for program, text in ((script, "exit 1"), (tool, "echo cmake version 3.30.1")):
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setattr(native_tools, "candidate_folders", lambda: [tmp_path / "target"])
    monkeypatch.setattr(native_tools.sysconfig, "get_path", lambda name: str(script.parent))
    monkeypatch.setenv("PATH", str(script.parent))
    assert native_tools.find_tool("cmake") == str(tool)
