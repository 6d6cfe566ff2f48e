"""A module shares one C++ runtime with torch, whatever the compiler would link, or the build fails with one sentence.

The objects of the last build are linked again: compiling takes minutes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from own_runtime import compiler_with_own_runtime

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "latest"
sys.path.insert(0, str(ROOT / "build_backend"))

import prove_module  # noqa: E402
from find_torch import Torch, find_torch  # noqa: E402
from native_tools import find_tool  # noqa: E402

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not (BUILT / "CMakeFiles" / "_C.dir").is_dir() or find_tool("ninja") is None,
    reason="needs the build folder of this checkout, and Ninja",
)

EXAMINE = """
import sys, torch.distributed, ctypes
from ldt.cli.lane_check.cxx_runtime import loaded_runtimes, runtime_problem
ctypes.CDLL(sys.argv[1])
print(runtime_problem(sys.argv[1]), len(loaded_runtimes()))
"""


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = compiler_with_own_runtime(tmp_path_factory.mktemp("compiler") / "own")
    if made is None:
        pytest.skip("needs g++ with libstdc++.a")
    return made


class Configured:
    """A build folder that CMake has configured for an environment. Nothing is compiled in it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        assert cmake is not None
        self.ninja = ninja
        options = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DLDT_WITH_CUDA=off",
            "-DLDT_UNITY=folder",  # as build/latest
        ]
        command = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def link_command(self) -> list[str]:
        """The link command of the module."""
        name = next(BUILT.glob("_C.*.so")).name
        listed = [str(self.ninja), "-C", str(self.folder), "-t", "commands", "-s", name]
        text = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        return shlex.split(text.removeprefix(": && ").removesuffix(" && :"))

    def link(self, command: list[str]) -> Path:
        """Run a link command on the objects of the last build."""
        words = [str(BUILT / word) if word.startswith(("CMakeFiles/", "lib")) else word for word in command]
        subprocess.run(words, cwd=self.folder, check=True)
        return next(self.folder.glob("_C.*.so"))


def examine(module: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EXAMINE, str(module)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_compiler_with_a_runtime_of_its_own(
    wrapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build links the runtime of torch; if it did not, the module would be rejected and removed."""
    build = Configured(tmp_path / "build", CXX=str(wrapper), LDFLAGS="-static-libstdc++ -static-libgcc")
    command = build.link_command()
    assert command[0] == str(wrapper)
    assert examine(build.link(command)) == "None 1"

    alone = [word for word in command if not Path(word).name.startswith(("libstdc++.so", "libgcc_s.so"))]
    assert alone != command
    module = build.link(alone)
    with pytest.raises(SystemExit) as refused:
        prove_module.prove(module.parent, tmp_path / "proven", find_torch())
    (sentence,) = str(refused.value).splitlines()
    assert "contains its own C++ runtime (it defines __cxa_throw) besides that of torch" in sentence
    assert "set CXX to the system's own" in sentence
    assert not module.exists()
    assert not (tmp_path / "proven").exists()


@pytest.mark.parametrize("flag", ["-D_GLIBCXX_USE_CXX11_ABI=0", "-D_GLIBCXX_DEBUG"])
def test_flags_that_change_the_layout_of_types(flag: str, tmp_path: Path) -> None:
    build = Configured(tmp_path / "build", CXXFLAGS=flag)
    lines = (build.folder / "build.ninja").read_text().splitlines()
    flags = [line for line in lines if line.strip().startswith("FLAGS = ") and flag in line]
    assert flags
    for line in flags:
        assert line.index(flag) < line.index("-U" + flag[2:].split("=")[0]), line


def test_a_proven_build_is_not_proven_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is for one module and one torch."""
    tried = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    note, torch = tmp_path / "proven", Torch(tmp_path / "torch", "2.13.0")
    for content, version, count in (
        ("a", "2.13.0", 1),
        ("a", "2.13.0", 1),
        ("b", "2.13.0", 2),
        ("b", "2.13.1", 3),
    ):
        (tmp_path / "_C.abi.so").write_text(content)
        prove_module.prove(tmp_path, note, torch._replace(version=version))
        assert len(tried) == count
    monkeypatch.setenv("LDT_PROVE", "off")
    (tmp_path / "_C.abi.so").write_text("c")
    prove_module.prove(tmp_path, note, torch)
    assert len(tried) == 3
