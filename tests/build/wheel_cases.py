"""Cases of install_matrix.py: wheels of ``make wheel``, installed and used in environments of their own."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from matrix import NEW_PIP, ROOT, Matrix, site_packages, version_of_torch


def wheel_of_this_torch(matrix: Matrix, name: str) -> None:
    """``make wheel`` for this environment, installed into a fresh one, and a training run there."""
    wheel = _make_wheel(matrix, name)
    folder = matrix.environment(name, torch=True, pip=NEW_PIP)
    _train_from_wheel(matrix, folder, wheel)


def wheel_of_another_torch(matrix: Matrix, name: str) -> None:
    """The same for another torch. Beside the running interpreter's, that wheel is refused, and names both."""
    here = version_of_torch(Path(metadata.distribution("torch").locate_file("")))
    minor = "2.14" if not here.startswith("2.14.") else "2.13"
    wheel = _make_wheel(matrix, name, "--torch", minor)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    other = site_packages(ROOT / "build" / "wheel" / f"{python}-torch{minor}")
    _train_from_wheel(matrix, matrix.environment(name, torch=other, pip=NEW_PIP), wheel)
    folder = matrix.environment(f"{name}-refused", torch=True, pip=NEW_PIP)
    install = [folder / "bin/python", "-m", "pip", "install", "--no-index"]
    refused = matrix.run([*install, wheel], fails=True).stdout
    assert f"torch=={minor}.*" in refused, refused
    matrix.run([*install, "--no-deps", wheel])
    refused = matrix.run([folder / "bin/python", "-c", "import ldt.runtime"], fails=True).stdout
    assert f"ldt was built against torch {minor}" in refused, refused
    assert f"but torch {here} is installed" in refused, refused


def _make_wheel(matrix: Matrix, name: str, *options: str) -> Path:
    program = ROOT / "build_backend" / "make_wheel.py"
    output = matrix.scratch / name
    matrix.run([sys.executable, program, "--device", "cpu", "--output", output, *options], cwd=ROOT)
    (wheel,) = output.glob("*-manylinux_*.whl")
    return wheel


def _train_from_wheel(matrix: Matrix, folder: Path, wheel: Path) -> None:
    """Install the wheel, and run the program of the README with it."""
    install = [folder / "bin/python", "-m", "pip", "install", "--no-index", wheel]
    matrix.check_installed(folder, matrix.run(install).stdout)
    readme = (ROOT / "README.md").read_text("utf-8")
    (program,) = re.findall(r"\[start:program\] -->\n```python\n(.*?)```", readme, re.DOTALL)
    (folder / "train.py").write_text(program)
    launch = [folder / "bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    output = matrix.run([*launch, "train.py"], cwd=folder).stdout
    assert "step 54 loss" in output, output
