"""The Dockerfile copies all that the build reads, and its image has no compiler and no root user."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dockerfile

ROOT = Path(__file__).resolve().parents[2]


def test_each_device_has_a_toolchain() -> None:
    bases = {stage.name: stage.base for stage in dockerfile.stages()}
    assert bases["build"] == "toolchain-${DEVICE}"
    assert "-devel-" in bases["toolchain-cu130"]
    assert bases["toolchain-cpu"] == bases[""]


def test_the_image_has_no_compiler_and_no_root_user() -> None:
    last = dockerfile.stages()[-1]
    assert last.all("USER") == ["ldt"]
    assert last.all("COPY") == [f"--from=build {dockerfile.PREFIX} {dockerfile.PREFIX}"]
    assert not re.search(r"g\+\+|gcc|build-essential|-dev\b|cmake", " ".join(last.all("RUN")))


def test_torch_comes_first_and_is_the_one_of_the_makefile() -> None:
    first, second = dockerfile.pip_commands(Path("/env"))
    assert first[-1] == "torch==${TORCH}"
    assert second == ["/env/bin/pip", "install", "--no-cache-dir", "."]
    (build,) = [stage for stage in dockerfile.stages() if stage.name == "build"]
    (wanted,) = re.findall(r"^TORCH_INSTALL \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"TORCH={wanted}" in build.all("ARG")


def test_what_is_copied_is_in_the_context() -> None:
    sources = {source for source, _ in dockerfile.copied()}
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)


def test_metadata_can_be_made_from_the_copied_files(tmp_path: Path) -> None:
    """setuptools reads the readme and the license."""
    dockerfile.copy_sources(tmp_path)
    program = "import ldt_build_backend as b; print(b.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": "build_backend"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ldt_torch-")
