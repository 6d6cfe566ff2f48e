"""Builds ldt against several versions of torch, each in its own environment, and runs the suites with each.

Run by ``make matrix ARGS="--torch 2.11 2.14"``, not by pytest: a version takes half an hour. Each gets a copy of the
working tree in ``build/torch/<version>``, which later runs update and reuse. pip chooses the newest release of a
version that its index has; on Linux x86-64 the default index has builds with CUDA (530 MB, 3 GB with its libraries).
"""

from __future__ import annotations

import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("lanes", "runtime", "train", "metadata", "integrations", "plan")
LIMIT = 7200  # seconds for the suites of one version
KEPT = (".venv", "build")  # of an earlier run
ROW = "{:<12} {:>7} {:>7} {:>8} {:>8} {:>7}"


class Counts(NamedTuple):
    """Tests by outcome; ``flaky`` ones failed beside others and passed when rerun by themselves."""

    passed: list[str]
    failed: list[str]
    flaky: list[str]
    skipped: list[str]


def run_versions(versions: list[str], suites: list[str]) -> bool:
    """Run the suites with each version and print a table. Returns True if nothing failed."""
    rows, passed = [], True
    for version in versions:
        start = time.monotonic()
        folder = ROOT / "build" / "torch" / version
        try:
            installed = build(version, folder)
            counts = run_suites(folder, suites)
        except subprocess.SubprocessError as error:
            rows.append(f"{version:<12} {error}; see {folder}/*.log")
            passed = False
            continue
        minutes = (time.monotonic() - start) / 60
        rows.append(ROW.format(installed, *map(len, counts), f"{minutes:.0f}"))
        passed = passed and not counts.failed
        for test in counts.failed:
            print(f"torch {installed}: FAILED {test}", flush=True)
        for test in counts.flaky:
            print(f"torch {installed}: failed, and passed by itself: {test}", flush=True)
    print(ROW.format("torch", *Counts._fields, "min"), *rows, sep="\n")
    return passed


def build(version: str, folder: Path) -> str:
    """Copy the working tree to ``folder``, install torch and build ldt without CUDA. Returns the version of torch."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    make = ["env", "LDT_WITH_CUDA=off", "make", "build", "VENV=.venv", "EXTRAS=examples,test"]
    _run([*make, f"TORCH_INSTALL=torch=={version}.*"], folder, log=folder / "build.log")
    return _run([".venv/bin/python", "-c", "import torch; print(torch.__version__)"], folder).strip()


def run_suites(folder: Path, suites: list[str]) -> Counts:
    """Run the suites in ``folder``, then those tests again that failed, one after the other."""
    paths = [f"tests/{suite}" for suite in suites]
    command = [".venv/bin/python", "-m", "pytest", "-q", "--junitxml=report.xml"]
    first = _pytest([*command, "-n", "2", "--dist", "loadfile", *paths], folder, "tests.log")
    if not first.failed:
        return first
    again = _pytest([*command, "--last-failed", *paths], folder, "rerun.log")
    flaky = [test for test in first.failed if test not in again.failed]
    return first._replace(failed=again.failed, flaky=flaky)


def _pytest(command: list[str], folder: Path, log: str) -> Counts:
    """Run pytest and read its report. Raises SubprocessError if it takes too long or leaves no report."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    with (folder / log).open("w") as file:
        done = subprocess.run(command, cwd=folder, stdout=file, stderr=file, check=False, timeout=LIMIT)
    if not report.exists():
        raise subprocess.CalledProcessError(done.returncode, command)
    return read_report(report.read_text("utf-8"))


def read_report(text: str) -> Counts:
    """Sort the tests of a JUnit report by outcome."""
    counts = Counts([], [], [], [])
    for test in ET.fromstring(text).iter("testcase"):
        outcomes = {child.tag for child in test}
        name = f"{test.get('classname')}::{test.get('name')}"
        if outcomes & {"failure", "error"}:
            counts.failed.append(name)
        elif "skipped" in outcomes:
            counts.skipped.append(name)
        else:
            counts.passed.append(name)
    return counts


def _run(command: list[str], folder: Path, log: Path | None = None) -> str:
    """Run a command and return its output. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if log is not None:
        log.write_text(done.stdout, "utf-8")
    done.check_returncode()
    return done.stdout
