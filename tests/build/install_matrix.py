"""Installs ldt into fresh environments in every supported way and checks the results.

Run by ``make matrix``, not by pytest: it takes minutes, and some isolated builds fetch setuptools from the index. The
interpreter that runs it needs torch; each environment gets that torch, with all it requires, by symbolic links.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dockerfile import copy_sources, pip_commands
from matrix import NEW_PIP, OLD_PIP, Matrix, link_torch, site_packages
from own_runtime import compiler_with_own_runtime
from torch_versions import SUITES, run_versions
from wheel_cases import wheel_of_another_torch, wheel_of_this_torch

NATIVE_TOOLS = {"cmake", "ninja", "ccache"}


def _path_without_native_tools(scratch: Path) -> str:
    """Return a PATH with a compiler but without CMake, Ninja and ccache."""
    folder = scratch / "bin"
    if not folder.exists():
        folder.mkdir()
        for tool in Path("/usr/bin").iterdir():
            if tool.name not in NATIVE_TOOLS:
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def pip_install(
    matrix: Matrix, name: str, pip: str, *options: object, source: object = ".", **extra: str
) -> None:
    folder = matrix.environment(name, torch=True, pip=pip)
    command = [folder / "bin/python", "-m", "pip", "install", "-v", *options, source]
    matrix.check_installed(folder, matrix.run(command, cwd=matrix.source, **extra).stdout)


def pip_offline(matrix: Matrix, name: str) -> None:
    """An isolated build without network uses the setuptools of the environment."""
    folder = matrix.environment(name, torch=True, pip=NEW_PIP)
    matrix.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder), "setuptools"]
    )
    command = [folder / "bin/python", "-m", "pip", "install", "-v", "--no-index", "."]
    matrix.check_installed(folder, matrix.run(command, cwd=matrix.source).stdout)


def pip_own_runtime(matrix: Matrix, name: str) -> None:
    """The compiler would link a C++ runtime of its own beside that of torch."""
    wrapper = compiler_with_own_runtime(matrix.scratch / "own-runtime")
    assert wrapper is not None, "needs g++ with libstdc++.a"
    pip_install(matrix, name, NEW_PIP, CXX=str(wrapper))


def pip_without_torch(matrix: Matrix, name: str, pip: str, *options: object) -> None:
    folder = matrix.environment(name, torch=False, pip=pip)
    if "--no-build-isolation" in options:
        matrix.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder), "setuptools"]
        )
    command = [folder / "bin/python", "-m", "pip", "install", *options, "."]
    matrix.check_nothing_installed(folder, matrix.run(command, cwd=matrix.source, fails=True).stdout)


def uv_install(matrix: Matrix, name: str, *, torch: bool) -> None:
    """uv runs offline: it has nothing to download."""
    folder = matrix.environment(name, torch=torch, pip=None)
    command = [matrix.tools / "bin/uv", "pip", "install", "--offline", "--python", folder / "bin/python", "."]
    if not torch:
        matrix.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", site_packages(folder), "setuptools"]
        )
    output = matrix.run(command, cwd=matrix.source, fails=not torch).stdout
    (matrix.check_installed if torch else matrix.check_nothing_installed)(folder, output)


def uv_environment(matrix: Matrix, name: str) -> None:
    """An environment that uv makes. setuptools, CMake and Ninja are in it: uv does not isolate the build."""
    folder = matrix.scratch / "env" / name
    uv = matrix.tools / "bin/uv"
    matrix.run([uv, "venv", "--python", sys.executable, folder])
    link_torch(site_packages(folder), sys.path)
    install = [uv, "pip", "install", "--python", folder / "bin/python"]
    matrix.run([*install, "setuptools>=77", "cmake", "ninja"])
    bare_path = {"PATH": _path_without_native_tools(matrix.scratch)}
    matrix.check_installed(folder, matrix.run([*install, "."], cwd=matrix.source, **bare_path).stdout)


def docker_commands(matrix: Matrix, name: str) -> None:
    """What the Dockerfile runs after it has installed torch, with the files that it copies."""
    source = matrix.scratch / name
    source.mkdir()
    copy_sources(source)
    folder = matrix.environment(name, torch=True, pip=NEW_PIP)
    _, command = pip_commands(folder)
    install = [folder / "bin/python", "-m", "pip", *command[1:]]
    matrix.check_installed(folder, matrix.run(install, cwd=source).stdout)


def build_isolated(matrix: Matrix, name: str) -> None:
    """``python -m build`` has no torch in its environment: it builds the archive, then fails with one sentence."""
    folder = matrix.environment(name, torch=False, pip=None)
    command = [matrix.tools / "bin/python", "-m", "build", "-o", matrix.scratch / name]
    matrix.check_nothing_installed(folder, matrix.run(command, cwd=matrix.source, fails=True).stdout)
    assert not list((matrix.scratch / name).glob("*.whl"))


def build_not_isolated(matrix: Matrix, name: str) -> None:
    folder = matrix.environment(name, torch=True, pip=NEW_PIP)
    matrix.run([folder / "bin/python", "-m", "pip", "install", "-q", "build"])
    command = [folder / "bin/python", "-m", "build", "--no-isolation", "-o", matrix.scratch / name]
    output = matrix.run(command, cwd=matrix.source).stdout
    wheel = next((matrix.scratch / name).glob("*.whl"))
    output += matrix.run([folder / "bin/python", "-m", "pip", "install", wheel]).stdout
    matrix.check_installed(folder, output)


def cases(matrix: Matrix) -> dict[str, Callable[[str], None]]:
    """The environments, by name, each with its method."""
    bare_path = {"PATH": _path_without_native_tools(matrix.scratch)}
    alone = "--no-build-isolation"
    return {
        "old-pip-isolated": lambda name: pip_install(matrix, name, OLD_PIP),
        "old-pip": lambda name: pip_install(matrix, name, OLD_PIP, alone),
        "old-pip-editable": lambda name: pip_install(matrix, name, OLD_PIP, alone, "--editable"),
        "new-pip-isolated": lambda name: pip_install(matrix, name, NEW_PIP),
        "new-pip": lambda name: pip_install(matrix, name, NEW_PIP, alone),
        "new-pip-editable-isolated": lambda name: pip_install(matrix, name, NEW_PIP, "--editable"),
        "new-pip-no-cmake": lambda name: pip_install(matrix, name, NEW_PIP, **bare_path),
        "new-pip-archive": lambda name: pip_install(matrix, name, NEW_PIP, source=matrix.archive),
        "new-pip-offline": lambda name: pip_offline(matrix, name),
        "new-pip-own-runtime": lambda name: pip_own_runtime(matrix, name),
        "uv": lambda name: uv_install(matrix, name, torch=True),
        "uv-environment": lambda name: uv_environment(matrix, name),
        "docker-commands": lambda name: docker_commands(matrix, name),
        "build-not-isolated": lambda name: build_not_isolated(matrix, name),
        "wheel": lambda name: wheel_of_this_torch(matrix, name),
        "wheel-another-torch": lambda name: wheel_of_another_torch(matrix, name),
        "no-torch-old-pip-isolated": lambda name: pip_without_torch(matrix, name, OLD_PIP),
        "no-torch-old-pip": lambda name: pip_without_torch(matrix, name, OLD_PIP, alone),
        "no-torch-new-pip-isolated": lambda name: pip_without_torch(matrix, name, NEW_PIP),
        "no-torch-new-pip": lambda name: pip_without_torch(matrix, name, NEW_PIP, alone),
        "no-torch-uv": lambda name: uv_install(matrix, name, torch=False),
        "no-torch-build": lambda name: build_isolated(matrix, name),
    }


def _cpu_seconds() -> float:
    """CPU time of all commands that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of the cases to run (default: all)")
    parser.add_argument(
        "--torch", nargs="+", metavar="X.Y", help="run the suites with these versions instead"
    )
    parser.add_argument("--suites", nargs="+", default=SUITES, choices=SUITES, help="suites of --torch")
    options = parser.parse_args()
    if options.torch:
        return 0 if run_versions(options.torch, options.suites) else 1
    only = options.only
    scratch = Path(tempfile.mkdtemp(prefix="ldt-matrix-"))
    failed = 0
    try:
        matrix = Matrix(scratch)
        for name, case in cases(matrix).items():
            if only and name not in only:
                continue
            start, start_cpu = time.monotonic(), _cpu_seconds()
            try:
                case(name)
                result = "ok"
            except AssertionError as error:
                failed += 1
                result = f"FAILED\n{error}"
            seconds, cpu = time.monotonic() - start, _cpu_seconds() - start_cpu
            print(f"{name:<28} {seconds:5.0f} s, {cpu:4.0f} s of CPU time  {result}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
