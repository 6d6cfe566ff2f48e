"""Builds wheels of ldt for several versions of torch and of Python, one for each. Run by ``make wheel``.

The version of a wheel names the torch and the device that it was built for, such as ``0.1.0+torch2.13.cpu``, and its
tag the oldest C library that it runs with, such as ``manylinux_2_35``. Without arguments, it is built for the torch and
the Python of this environment. Others get an environment of their own in ``build/wheel``, which later runs use again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from find_setuptools import MINIMUM
from find_torch import find_torch

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "wheel"
# torch's libraries are those of the installed torch, never copies in the wheel.
TORCH_LIBRARIES = ("libtorch*", "libc10*")
WITH_CUDA = {"auto": "auto", "cpu": "off", "cuda": "on"}


def local_version(wheel: Path) -> str:
    """What the module in the wheel was built for: ``torch2.13.cpu`` or, with CUDA kernels, ``torch2.13.cu130``."""
    with zipfile.ZipFile(wheel) as archive:
        info = archive.read("ldt/_build_info.py").decode()
    minor = re.search(r'^TORCH_VERSION = "(\d+\.\d+)', info, re.MULTILINE)
    toolkit = re.search(r'^CUDA = "on \(toolkit (\d+)\.(\d+)', info, re.MULTILINE)
    assert minor, info
    return f"torch{minor[1]}.{f'cu{toolkit[1]}{toolkit[2]}' if toolkit else 'cpu'}"


def name_after_torch(wheel: Path) -> Path:
    """Writes the same wheel, its version extended by `local_version`, beside ``wheel`` and returns its path."""
    name, version, tag = wheel.stem.split("-", 2)
    full = f"{version}+{local_version(wheel)}"
    old, new = f"{name}-{version}.dist-info/", f"{name}-{full}.dist-info/"
    named = wheel.with_name(f"{name}-{full}-{tag}.whl")
    record = [f"{new}RECORD,,\n"]
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(named, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == f"{old}RECORD":
                continue
            if entry.filename == f"{old}METADATA":
                data = data.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {full}\n".encode(), 1)
            entry.filename = entry.filename.replace(old, new, 1)
            target.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(data)}\n")
        target.writestr(f"{new}RECORD", "".join(record))
    return named


def find_python(wanted: str) -> str:
    """The interpreter of a version (``3.12``) or path. Raises SystemExit with one sentence if it does not run."""
    program = wanted if "/" in wanted else f"python{wanted}"
    if shutil.which(program) is not None:
        done = subprocess.run([program, "--version"], capture_output=True, check=False)
        if done.returncode == 0:
            return program
    raise SystemExit(
        f"ldt: expected Python {wanted}, and `{program}` does not run here; put it on PATH or name its path."
    )


def environment(python: str, torch: str, index: str | None) -> Path:
    """The interpreter of an environment with this Python, the newest release of this torch, and setuptools."""
    program = find_python(python)
    folder = SCRATCH / f"python{python.strip('/').replace('/', '-')}-torch{torch}"
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        _run([program, "-m", "venv", folder])
    wanted = [f"torch=={torch}.*", f"setuptools>={MINIMUM}"]
    _run(
        [interpreter, "-m", "pip", "install", "--quiet", *(["--index-url", index] if index else []), *wanted]
    )
    return interpreter


def build(python: Path, device: str, output: Path) -> Path:
    """Builds the wheel for the torch of an environment, repairs its tag and returns its path in ``output``."""
    built = SCRATCH / "built"
    shutil.rmtree(built, ignore_errors=True)
    options = {"LDT_WITH_CUDA": WITH_CUDA[device], "LDT_BUILD_TESTS": "OFF"}
    _run(
        [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, ROOT],
        **options,
    )
    (wheel,) = built.glob("*.whl")
    named = name_after_torch(wheel)
    excluded = [f"--exclude={library}" for library in TORCH_LIBRARIES]
    _run([sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", built / "repaired", named])
    (repaired,) = (built / "repaired").glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(repaired, output / repaired.name))


def _run(command: list[object], **variables: str) -> None:
    """Runs a command, this environment's programs first. Raises CalledProcessError, after its output, if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PATH": path} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr, flush=True)
        done.check_returncode()


def main() -> int:
    """Builds each wheel and prints its name; a build that fails does not keep the others from it."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", nargs="+", metavar="X.Y", help="versions of torch (default: the installed one)"
    )
    parser.add_argument(
        "--python", nargs="+", metavar="X.Y", help="versions of Python, or paths (default: this one)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=WITH_CUDA,
        help="cuda: with kernels; auto: if there is a CUDA toolkit",
    )
    parser.add_argument("--index-url", help="where pip finds torch, such as PyTorch's index of CPU builds")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)"
    )
    options = parser.parse_args()
    installed = ".".join(find_torch().version.split(".")[:2])
    status = 0
    for python in options.python or []:
        find_python(python)
    for torch, python in itertools.product(options.torch or [installed], options.python or [here]):
        start = time.monotonic()
        try:
            is_here = (torch, python) == (installed, here)
            interpreter = Path(sys.executable) if is_here else environment(python, torch, options.index_url)
            result = build(interpreter, options.device, options.output).name
        except subprocess.CalledProcessError as error:
            result, status = f"FAILED: {error}", 1
        print(f"torch {torch}  Python {python}  {time.monotonic() - start:4.0f} s  {result}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
