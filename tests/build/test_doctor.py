"""``python -m ldt doctor`` reports a working installation, or a problem with its remedy and exit status 1."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import ldt
from ldt import cli
from ldt.cli import doctor
from ldt.cli.lane_check import HOST, try_lane

pytest.importorskip("torch")


def break_import(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    real = importlib.import_module

    def import_module(wanted: str, package: str | None = None) -> Any:
        if wanted == name:
            raise error
        return real(wanted, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


def list_children() -> list[str]:
    """Child processes that were not waited for."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["doctor"])
    return status, capsys.readouterr().out


def test_all_is_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ldt", "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    for word in (
        "ldt ",
        "python ",
        "torch ",
        "compiler ",
        "CUDA kernels ",
        "backends ",
        "gloo",
        "C++ runtime ",
        "Nothing is broken.",
    ):
        assert word in done.stdout
    assert re.search(r"^host lane +\d+ µs, [\d.e+-]+ GB/s$", done.stdout, re.MULTILINE), done.stdout


def test_module_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.ldt, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda **_: [])
    status, text = report(capsys)
    assert status == 1
    assert "problem: There is no ldt._C" in text
    assert "remedy: rebuild with `pip install" in text


def test_installed_package_hidden_by_the_source_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    for folder in (site / "ldt", site / "ldt_torch-1.0.dist-info", source):
        folder.mkdir(parents=True)
    (site / "ldt_torch-1.0.dist-info" / "METADATA").write_text("Name: ldt-torch\nVersion: 1.0\n")
    (site / "ldt" / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(doctor.ldt, "__file__", str(source / "__init__.py"))
    status, text = report(capsys)
    assert status == 1
    assert (
        f"start Python in another folder: {source} hides the package that is installed in {site / 'ldt'}."
        in text
    )


def test_module_of_another_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(doctor.ldt, "__file__", str(tmp_path / "__init__.py"))
    status, text = report(capsys)
    assert status == 1
    assert "is not for this Python" in text


def test_module_of_another_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    info = types.SimpleNamespace(
        TORCH_VERSION="2.7.1", PYTHON_VERSION="3.11.0", COMPILER="GNU 12", BUILD_TYPE="Release", CUDA="off"
    )
    monkeypatch.setitem(sys.modules, "ldt._build_info", info)
    status, text = report(capsys)
    assert status == 1
    assert "problem: ldt was built against torch 2.7.1, but torch" in text
    assert "or install torch 2.7.*." in text


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is not installed."),
        (RuntimeError("no CANN"), "`import torch` fails: no CANN"),
    ],
)
def test_torch_missing_or_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, problem: str
) -> None:
    break_import(monkeypatch, "torch", error)
    status, text = report(capsys)
    assert status == 1
    assert f"problem: {problem}" in text


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that precedes the package on the path of a trial's processes, with a copy of ldt.cli to break."""
    shutil.copytree(Path(cli.__file__).parent, tmp_path / "cli")
    monkeypatch.setattr(ldt, "__path__", [str(tmp_path), *ldt.__path__])
    return tmp_path


def break_line(file: Path, line: str, by: str) -> None:
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, by))


def test_module_that_cannot_be_loaded(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = next(Path(ldt.__file__).parent.glob("_C.*.so"))
    (overlay / module.name).write_bytes(b"no library")
    status, text = report(capsys)
    assert status == 1
    assert "problem: host lane: `import ldt._C` fails: ImportError: " in text
    assert "remedy: rebuild with `pip install" in text


def test_lane_whose_process_is_killed_by_a_signal(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = overlay / "cli" / "lane_check" / "rank.py"
    break_line(file, "    faulthandler.enable()\n", "    report(phase='recv'); os.kill(os.getpid(), 11)\n")
    status, text = report(capsys)
    assert status == 1
    assert re.search(r"problem: host lane: rank [01], in 'recv', was killed by SIGSEGV", text), text
    assert "remedy: rebuild with `pip install" in text


def test_lane_that_hangs(overlay: Path) -> None:
    file = overlay / "cli" / "lane_check" / "rank.py"
    break_line(file, "    faulthandler.enable()\n", "    report(phase='recv'); signal.pause()\n")
    break_line(file, "import os\n", "import os\nimport signal\n")
    before = list_children()
    trial = try_lane(HOST, seconds=0.5)
    assert trial.problem is not None
    assert re.fullmatch(r"rank [01], in 'recv', made no progress for 0.5 s", trial.problem)
    assert trial.remedy is not None
    assert "GLOO_SOCKET_IFNAME" in trial.remedy
    assert list_children() == before, "processes are left"


def test_lane_that_corrupts_bytes(overlay: Path) -> None:
    """The second rank expects, and forwards, other bytes."""
    file = overlay / "cli" / "lane_check" / "messages.py"
    break_line(file, "manual_seed(seed)", "manual_seed(seed + dist.get_rank())")
    trial = try_lane(HOST)
    assert trial.problem is not None
    assert re.fullmatch(
        r"rank 1, in 'small messages', failed: AssertionError: \d+ of 1024 bytes of tensor 0 are not what was sent",
        trial.problem,
    )


def test_gloo_without_a_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    def refuse(*_: object) -> None:
        raise RuntimeError("unable to resolve hostname")

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", refuse)
    status, text = report(capsys)
    assert status == 1
    assert "GLOO_SOCKET_IFNAME" in text


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctr"])
    assert caught.value.code == 2
