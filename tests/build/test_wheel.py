"""The version of a wheel names the torch and the device that it was built for; its record stays right."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build_backend"))

import make_wheel  # noqa: E402

INFO = 'TORCH_VERSION = "{torch}"\nCUDA = "{cuda}"\n'
METADATA = "Metadata-Version: 2.4\nName: ldt-torch\nVersion: 0.1.0\nRequires-Dist: torch==2.13.*\n"
KERNELS = "on (toolkit 13.0.88, architectures 90-real)"


def write_wheel(folder: Path, torch: str, cuda: str) -> Path:
    wheel = folder / "ldt_torch-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ldt/_build_info.py", INFO.format(torch=torch, cuda=cuda))
        archive.writestr("ldt_torch-0.1.0.dist-info/METADATA", METADATA)
        archive.writestr("ldt_torch-0.1.0.dist-info/RECORD", "ldt/_build_info.py,,\n")
    return wheel


@pytest.mark.parametrize(
    ("torch", "cuda", "local"),
    [
        ("2.13.0+cpu", "off (LDT_WITH_CUDA=off)", "torch2.13.cpu"),
        ("2.14.1", "off (no CUDA toolkit found)", "torch2.14.cpu"),
        ("2.11.0+cu130", KERNELS, "torch2.11.cu130"),
    ],
)
def test_the_version_names_torch_and_device(tmp_path: Path, torch: str, cuda: str, local: str) -> None:
    named = make_wheel.name_after_torch(write_wheel(tmp_path, torch, cuda))
    assert named.name == f"ldt_torch-0.1.0+{local}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(named) as archive:
        metadata = archive.read(f"ldt_torch-0.1.0+{local}.dist-info/METADATA").decode()
    assert metadata == METADATA.replace("Version: 0.1.0", f"Version: 0.1.0+{local}")


def test_the_record_has_every_file_with_its_hash(tmp_path: Path) -> None:
    with zipfile.ZipFile(make_wheel.name_after_torch(write_wheel(tmp_path, "2.13.0", KERNELS))) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("RECORD")]
        rows = dict(line.split(",", 1) for line in archive.read(record).decode().splitlines())
        assert rows.pop(record) == ","
        assert set(rows) | {record} == set(archive.namelist())
        for name, row in rows.items():
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert row == f"sha256={digest},{len(data)}"


def test_a_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "python3"
    program.write_text("#!/bin/sh\nexit 127\n")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, make_wheel.__file__, "--python", str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"ldt: expected Python {program}, and `{program}` does not run here; put it on PATH or name its path.\n"
    )
