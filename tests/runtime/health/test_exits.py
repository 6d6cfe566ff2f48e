"""Processes that exit without closing their mesh, LDT_LOG, and a store that hangs or dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ldt.runtime.health import watchdog
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.testing import allowed, in_time, paced

_SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches

rank, case = int(os.environ["RANK"]), sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
topology = ldt.Topology([1, 1, 1])
mesh = ldt.connect(topology)
chunks = [toy_chunks(topology)[index] for index in topology.chunks_of(mesh.stage)]
pipeline = ldt.Pipeline(chunks, mesh, loss_fn=toy_loss)
batch = toy_microbatches(2) if mesh.is_edge else None
pipeline.step(batch)
if rank == 1 and case == "raise":
    raise ValueError("the loader ran dry")
if rank == 1:
    sys.exit(3)
try:
    pipeline.step(batch)
    pipeline.step(batch)
except ldt.LdtError as error:
    print(json.dumps([type(error).__name__, error.rank, str(error)]))
"""


def start(script: Path, case: str, rank: int, port: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "1",  # the store is this process's
        "LDT_LOG": "debug" if rank == 2 else "",
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, str(script), case]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (
            "raise",
            1,
            "rank 1 (stage 1, replica 0) failed first in the code that uses the mesh: ValueError: the loader",
        ),
        ("exit", 3, "rank 1 exited without closing its mesh after call 2"),
    ],
)
def test_a_process_that_exits_is_reported(tmp_path: Path, case: str, code: int, words: str) -> None:
    """Without a context manager or other help from the script, each rank exits on its own."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [start(script, case, rank, store.port) for rank in range(3)]
    try:
        outputs = [process.communicate(timeout=allowed(60)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, code, 0], outputs
    for rank in (0, 2):
        kind, named, text = json.loads(outputs[rank][0])
        assert (kind, named) == ("RemoteStageError", 1)
        assert words in text
    assert "[rank 0" not in outputs[0][1]
    logged = outputs[2][1]
    assert re.search(r"\[rank 2 \d\d:\d\d:\d\d\.\d{3}\] connected as Mesh", logged)
    for action in ("2RECV_F0", "2F0", "2SEND_F1", "2B1"):
        assert re.search(rf"\[rank 2 [^]]*\] action {action} \(\d+ of \d+\): chunk 2, microbatch", logged), (
            logged
        )


def test_an_unknown_level_is_refused() -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import ldt"],
        env=os.environ | {"LDT_LOG": "loud"},
        capture_output=True,
        text=True,
        timeout=allowed(60),
        check=False,
    )
    assert process.returncode == 1
    assert "LDT_LOG: expected one of debug, info, warning, error, got 'loud'" in process.stderr


_STORE = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""


def test_a_failure_does_not_wait_for_an_outage_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not answer, as when the link to it is down. Its own error ends this rank long before."""
    monkeypatch.setattr(watchdog, "_PUBLISH_SECONDS", paced(1.0).total_seconds())
    keeper = subprocess.Popen([sys.executable, "-c", _STORE], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), None, False)
        watch = Watchdog(store, "failure", lambda report: None, store_timeout=61.0, extra_wait=60.0)
        time.sleep(0.5)
        keeper.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        start, report = time.monotonic(), FailureReport(1, 1, 0, "x", "y")
        assert watch.publish(report) is report
        watch.close()
        assert in_time(time.monotonic() - start, 5.0)
    finally:
        keeper.kill()
        keeper.communicate()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_hangs_or_dies(how: signal.Signals) -> None:
    """A stopped store keeps its connections but does not answer; a killed one closes them."""
    keeper = subprocess.Popen([sys.executable, "-c", _STORE], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
        seen: list[FailureReport] = []
        timeout = paced(1.5).total_seconds()
        watch = Watchdog(dist.PrefixStore("job", store), "failure", seen.append, store_timeout=timeout)
        time.sleep(0.5)
        assert watch.first is None
        keeper.send_signal(how)
        start = time.monotonic()
        report = watch.wait(paced(10.0).total_seconds())
        assert report is not None
        assert in_time(time.monotonic() - start, 4.0)
        assert "the store of the process group has not answered for" in report.describe()
        assert seen == [report]
        assert watch.publish(FailureReport(1, 1, 0, "x", "y")) is report
        watch.close()
    finally:
        keeper.kill()
        keeper.wait()
