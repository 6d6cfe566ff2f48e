"""Shows what is installed and built, and what is broken, with remedies; or tests the link between two sites."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import ldt
from ldt import _torch_abi
from ldt.cli.units import limit
from ldt.errors import LdtError
from ldt.launch.description import read

BACKENDS = ("gloo", "nccl", "hccl", "mpi", "ucc")
OPTIONAL = {
    "matplotlib": "pictures of timelines (ldt-torch[plot])",
    "tabulate": "tables of the examples (ldt-torch[examples])",
    "tqdm": "progress bar of the examples (ldt-torch[examples])",
    "transformers": "Hugging Face models (ldt-torch[hf])",
    "safetensors": "their weights (ldt-torch[hf])",
    "accelerate": "the Trainer of transformers (ldt-torch[trainer])",
    "lightning": "LightningModules (ldt-torch[lightning])",
    "bitsandbytes": "weights in 4 bits and optimizers in 8 bits (ldt-torch[qlora])",
    "peft": "adapters (ldt-torch[examples])",
    "sklearn": "images of the examples (ldt-torch[examples])",
    "rich": "a view of a run in the terminal (ldt-torch[live])",
    "torch_npu": "Ascend NPUs (ldt-torch[npu])",
}
MINIMUM_PYTHON = (3, 10)


class Finding(NamedTuple):
    """One line of the report. A finding with a problem is broken and has a remedy."""

    subject: str
    value: str
    problem: str | None = None
    remedy: str | None = None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = (
        "for a link: --link job.toml --site edge, and at the same time --site cloud on the other host"
    )
    parser.add_argument(
        "--link",
        type=Path,
        metavar="FILE",
        help="test the link of that description, together with the other site",
    )
    parser.add_argument("--site", help="which of its sites this host is")
    parser.add_argument(
        "--timeout",
        type=limit,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the other site (default: 60)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 1 if something is broken, 2 for a wrong description, otherwise 0."""
    if arguments.link is not None:
        return _run_link(arguments)
    if arguments.site is not None:
        print("python -m ldt doctor: --site is for --link: add --link job.toml", file=sys.stderr)
        return 2
    findings = examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:<{width}}  {finding.value}")
    broken = [finding for finding in findings if finding.problem]
    for finding in broken:
        print(f"\nproblem: {finding.problem}\n remedy: {finding.remedy}")
    if not broken:
        print("\nNothing is broken.")
    return 1 if broken else 0


def _run_link(arguments: argparse.Namespace) -> int:
    try:
        description = read(arguments.link)
        description.check_site(arguments.site)
    except LdtError as error:
        print(f"python -m ldt doctor: {error}", file=sys.stderr)
        return 2
    from ldt.cli.link_check import check_link

    try:
        report = check_link(description, arguments.site, arguments.timeout)
    except LdtError as error:
        print(f"problem: {error}")
        return 1
    rows, problems = list(report.rows()), list(report.problems())
    width = max(len(subject) for subject, _ in rows)
    for subject, value in rows:
        print(f"{subject:<{width}}  {value}")
    for problem, remedy in problems:
        print(f"\nproblem: {problem}\n remedy: {remedy}")
    for sentence in report.advice():
        print(f"\nfaster: {sentence}")
    if not problems:
        print("\nThe link has what a job needs.")
    return 1 if problems else 0


def examine() -> list[Finding]:
    """Return all findings in the order of the report."""
    findings = [*_interpreter(), *_build()]
    torch, finding = _import_torch()
    findings.append(finding)
    module = _module(torch)
    findings.append(module)
    if torch is not None:
        backends = list(_backends(torch))
        findings += [*backends, *_devices(torch)]
        if not any(found.problem for found in (module, *backends)):
            lanes = list(_lanes(torch))
            findings += lanes
            # Without a lane ldt._C may not load, and the runtime imports it.
            if not any(found.problem for found in lanes):
                findings += _tcp()
    return findings + list(_optional())


def _interpreter() -> Iterator[Finding]:
    yield Finding("ldt", f"{ldt.__version__} in {Path(ldt.__file__).parent}")
    python = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < MINIMUM_PYTHON:
        yield Finding("python", python, "Python is older than 3.10.", "use Python 3.10 or newer.")
    else:
        yield Finding("python", python)


def _build() -> Iterator[Finding]:
    try:
        info = importlib.import_module("ldt._build_info")
    except ImportError:
        yield Finding("built", "no", "ldt's compiled module was not built.", _how_to_build())
        return
    yield Finding("built against", f"torch {info.TORCH_VERSION}, Python {info.PYTHON_VERSION}")
    yield Finding("compiler", f"{info.COMPILER}, {info.BUILD_TYPE}")
    yield Finding("CUDA kernels", info.CUDA)


def _how_to_build() -> str:
    """The remedy for a missing compiled module. Usually the source folder just hides the installed package."""
    here = Path(ldt.__file__).parent.resolve()
    for distribution in importlib.metadata.distributions(name="ldt-torch"):
        installed = Path(str(distribution.locate_file("ldt"))).resolve()
        if installed != here and any(installed.glob("_C.*.so")):
            return (
                f"start Python in another folder: {here} hides the package that is installed in {installed}."
            )
    return f"rebuild with {_torch_abi.REBUILD}."


def _import_torch() -> tuple[Any, Finding]:
    """Import torch. Returns None and a finding with the problem if that fails."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            wanted = _torch_abi.minor_of(_torch_abi.built_against() or "2.13")
            return None, Finding("torch", "missing", "torch is not installed.", f"install torch=={wanted}.*.")
        return None, _failed_torch(error)
    except Exception as error:  # the report continues, whatever a broken installation raises
        return None, _failed_torch(error)
    return torch, Finding("torch", f"{torch.__version__} in {Path(str(torch.__file__)).parent}")


def _failed_torch(error: Exception) -> Finding:
    remedy = "reinstall torch."
    if importlib.util.find_spec("torch_npu") is not None:
        remedy = "source the CANN environment for torch_npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    return Finding("torch", "cannot be imported", f"`import torch` fails: {error}", remedy)


def _module(torch: Any) -> Finding:
    """Check that ldt._C exists and was built for this Python and this torch. The lanes show whether it loads."""
    folder = Path(ldt.__file__).parent
    files = sorted(path.name for path in folder.glob("_C.*.so"))
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    built = _torch_abi.built_against()
    rebuild = f"rebuild with {_torch_abi.REBUILD}."
    if not files:
        return Finding("ldt._C", "missing", f"There is no ldt._C in {folder}.", _how_to_build())
    if f"_C{suffix}" not in files:
        return Finding("ldt._C", files[0], f"ldt._C is not for this Python, which needs _C{suffix}.", rebuild)
    if torch is None:
        return Finding("ldt._C", "not tried, torch is missing")
    mismatch = _torch_abi.mismatch(built, torch.__version__) if built else None
    if mismatch is not None:
        remedy = f"{rebuild[:-1]}, or install torch {_torch_abi.minor_of(built or '')}.*."
        return Finding("ldt._C", "not tried, other torch", mismatch.split(":", 1)[0] + ".", remedy)
    return Finding("ldt._C", f"_C{suffix}")


def _backends(torch: Any) -> Iterator[Finding]:
    """List the process group backends of this torch and check that gloo works, which every job needs."""
    distributed = torch.distributed
    if not distributed.is_available():
        remedy = "install a torch that is built with torch.distributed."
        yield Finding("backends", "none", "This torch has no torch.distributed.", remedy)
        return
    available = [name for name in BACKENDS if distributed.is_backend_available(name)]
    missing = [name for name in BACKENDS if name not in available]
    listed = ", ".join(available) or "none"
    yield Finding("backends", f"{listed} (not in this torch: {', '.join(missing) or 'none'})")
    if "gloo" not in available:
        remedy = "install a torch that has gloo: ldt's control messages need it."
        yield Finding("gloo", "missing", "This torch has no gloo.", remedy)
        return
    try:
        distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=10))
    except RuntimeError as error:
        remedy = "set GLOO_SOCKET_IFNAME to a network interface of this machine (such as lo or eth0)."
        yield Finding("gloo", "broken", f"gloo cannot open a connection: {error}", remedy)


def _devices(torch: Any) -> Iterator[Finding]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    npu = getattr(torch, "npu", None)
    if npu is not None:
        names += [f"NPU {index}" for index in range(npu.device_count())]
    yield Finding("devices", ", ".join(["CPU", *names]))


def _lanes(torch: Any) -> Iterator[Finding]:
    """Try each kind of lane: latency of a small message, bandwidth of a large one, or what is broken."""
    from ldt.cli.lane_check import HOST, lane_kinds, try_lane

    for kind in lane_kinds(torch):
        trial = try_lane(kind)
        if kind == HOST and trial.runtimes:
            yield Finding("C++ runtime", ", ".join(trial.runtimes))
        subject = f"{kind.name} lane"
        if trial.problem is None:
            yield Finding(subject, trial.figures)
            continue
        yield Finding(subject, "broken", f"{subject}: {trial.problem}.", f"{trial.remedy}.")
        if not trial.loads:
            return


def _tcp() -> Iterator[Finding]:
    """What a connection over a long link may have under way, and whether it may use bbr where packets are lost."""
    from ldt.runtime.comm.socket_choice import KEEP_WINDOW, TcpLimits, allow_bbr

    limits = TcpLimits.of_this_host()
    bbr = "bbr allowed" if limits.allows_bbr else f"no bbr; for lossy links, as root: {allow_bbr()}"
    pauses = f"; slow after pauses on long links, unless as root: {KEEP_WINDOW}" if limits.restarts else ""
    yield Finding("TCP", f"{limits.window / 1e6:.1f} MB under way in a connection; {bbr}{pauses}")


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        installed = importlib.util.find_spec(name) is not None
        yield Finding(name, "installed" if installed else f"not installed; for {purpose}")
