"""gloo over TLS, set up as in docs/security.md: a step is right, and peers without a certificate are rejected."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import ldt
from ldt.testing import allowed

ROOT = Path(ldt.__file__).parents[1]
JOB = Path(__file__).parent / "tls_job.py"
DEADLINE = allowed(90.0)
PROBE = (
    "import torch.distributed as dist\n"
    "from torch._C._distributed_c10d import HashStore\n"
    "dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)"
)
Environment = dict[str, str]


def blocks_of_document() -> list[str]:
    """Return the shell commands of the section about TLS: certificates, then the environment."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = text[text.index("## TLS") :]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def make_certificates(folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(
        ["bash", "-euc", blocks_of_document()[0]],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=DEADLINE,
    )
    return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "job")


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "others")


def over_tls(folder: Path) -> Environment:
    """Return the environment after a shell in ``folder`` has run the document's commands."""
    command = f"{blocks_of_document()[1]}\nenv -0"
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
    )
    pairs = (entry.split("=", 1) for entry in done.stdout.decode().split("\0") if "=" in entry)
    return {name: value for name, value in pairs if name.startswith("GLOO_")}


@pytest.fixture(scope="module")
def tls(certificates: Path) -> Environment:
    """Skip if gloo lacks the TLS transport."""
    environment = over_tls(certificates)
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if "unsupported gloo device" in done.stderr:
        pytest.skip("this torch was built without USE_GLOO_WITH_OPENSSL: its gloo has no transport TCP_TLS")
    return environment


def run_job(environments: list[Environment]) -> list[tuple[int, str]]:
    """Return exit code and output of each rank."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(rank), str(store.port)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


# -- without TLS in gloo -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_job_runs_in_plain_text() -> None:
    for code, output in run_job([{}] * 3):
        assert (code, output.strip().splitlines()[-1]) == (0, "equal"), output


def context(side: int, folder: Path, site: str) -> ssl.SSLContext:
    """Configured like gloo's: TLS 1.3, and the peer needs a certificate of the job's authority, under any name."""
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(folder / "ca.pem")
    made.load_cert_chain(folder / f"{site}.pem", folder / f"{site}.key")
    return made


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Return whether both sides accept the other's certificate."""
    here, there = socket.socketpair()
    taken: list[bytes] = []

    def serve() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as wrapped:
                taken.append(wrapped.recv(5))
        except (ssl.SSLError, OSError):
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here) as wrapped:
            wrapped.sendall(b"hello")
    except (ssl.SSLError, OSError):
        here.close()
    thread.join(10.0)
    return taken == [b"hello"]


def test_certificates_of_one_authority_are_accepted_and_others_rejected(
    certificates: Path, of_others: Path
) -> None:
    server, client = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    for one, other in (("edge", "cloud"), ("cloud", "edge")):
        assert handshake(context(server, certificates, one), context(client, certificates, other))
    stranger = context(client, of_others, "cloud")
    stranger.load_verify_locations(
        certificates / "ca.pem"
    )  # it trusts the job's authority, but the job does not trust its authority
    assert not handshake(context(server, certificates, "edge"), stranger)


# -- with TLS in gloo ----------------------------------------------------------------------------------------------


def test_a_step_over_tls_matches_the_unsplit_model(tls: Environment) -> None:
    for code, output in run_job([tls] * 3):
        assert (code, output.strip().splitlines()[-1]) == (0, "equal"), output


@pytest.mark.parametrize("stranger", ["of another authority", "in plain text"])
def test_a_stranger_is_refused(tls: Environment, of_others: Path, stranger: str) -> None:
    last = over_tls(of_others) if stranger == "of another authority" else {}
    for code, output in run_job([tls, tls, last]):
        assert code != 0, output
        assert "equal" not in output.splitlines()
