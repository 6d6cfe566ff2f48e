"""Tests that the fault harness itself detects errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from faults import verdict
from faults.__main__ import table
from faults.fault import SAVE_EVERY, STEPS, Fault, FaultKind, draw
from faults.harness import FaultError, Outcome, left_files
from faults.job import Raised, Report
from faults.leak_check import Resources, tcp_connections
from faults.verdict import complaints, resumption_complaints
from faults.worker_pool import Ending, Injected, Worker, WorkerPool

SAVES = list(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
GOOD = Report(done=STEPS, digests={step: str(step) for step in range(STEPS + 1)}, tried=SAVES, saved=SAVES)


def act(worker: Worker, what: str) -> str:
    if what == "hang":
        time.sleep(60.0)
    elif what == "exit":
        os._exit(7)
    elif what == "raise":
        raise ValueError("no")
    worker.report_fault(Injected(1.0))
    return f"rank {worker.rank}"


def test_a_pool_reports_how_each_rank_ended_and_replaces_it() -> None:
    with WorkerPool(4) as pool:
        pool.run(act, ["answer"] * 4, timeout=60.0)
        answered, hung, gone, raised = pool.run(act, ["answer", "hang", "exit", "raise"], timeout=2.0)
        assert answered == Ending("rank 0")
        assert pool.injected == [Injected(1.0)]
        assert "in act" in (hung.stack or "")
        assert gone == Ending(exit_code=7)
        assert "ValueError: no" in raised.answer
        again = pool.run(act, ["answer"] * 4, timeout=60.0)
        assert [end.answer for end in again] == [f"rank {rank}" for rank in range(4)]


def test_leaks_of_a_process_are_detected() -> None:
    before = Resources.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    more = "\n".join(Resources.now().excess_over(before))
    assert "1 threads" in more
    assert "1 open socket" in more
    assert "1 open pipe" in more
    assert f"child process {child.pid}" in more
    stop.set()
    thread.join()
    listener.close()
    child.communicate()
    assert before.leaked_since() == []


@pytest.mark.parametrize("launcher", [["setsid"], ["sh", "-c", 'exec 3<&0; "$0" "$@" <&3 &']])
def test_a_file_left_in_shared_memory_is_detected_unless_another_program_maps_it(
    tmp_path: Path, launcher: list[str]
) -> None:
    """One of another session, or one that is no descendant. A folder of its own: others check /dev/shm meanwhile."""
    own_file, of_other = tmp_path / "own_file", tmp_path / "of_other"
    hold = "import mmap, sys; f = open(sys.argv[1], 'r+'); m = mmap.mmap(f.fileno(), 4); print(flush=True); input()"
    other = None
    try:
        for path in (own_file, of_other, tmp_path / "sem.of_a_killed_rank"):
            path.write_bytes(b"left")
        other = subprocess.Popen(
            [*launcher, sys.executable, "-c", hold, str(of_other)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert other.stdout is not None
        other.stdout.readline()
        assert left_files(set(), tmp_path) == [own_file]
    finally:
        if other is not None:
            other.communicate(b"\n")


def test_connections_count_their_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        local = socket.create_connection(listener.getsockname())
        remote, _ = listener.accept()
        local.sendall(b"12345")
        assert remote.recv(5) == b"12345"
        found = {connection.fd: connection for connection in tcp_connections()}
        assert (
            found[local.fileno()].sent - found[remote.fileno()].sent >= 5
        )  # Linux may count the first packet, too
        assert found[remote.fileno()].received - found[local.fileno()].received == 5
        assert found[local.fileno()].peer_port == listener.getsockname()[1]
        assert listener.fileno() not in found
        local.close()
        remote.close()


def raised(kind: str = "RemoteStageError", **details: Any) -> Raised:
    values: dict[str, Any] = {"time": 10.1, "text": "", "trace": "", "ours": True, "rank": None}
    return Raised(kind=kind, remote=kind == "RemoteStageError", **(values | details))


def fault_of(kind: FaultKind) -> Fault:
    """Return a fault on rank 1 while step 3 is saved."""
    return replace(draw(0), kind=kind, rank=1, step=3, point="save", detail="")


def found_in(kind: FaultKind, endings: list[Ending]) -> str:
    return "\n".join(complaints(fault_of(kind), [Injected(10.0)], endings, [GOOD] * len(endings)))


def failing(failure: Raised | None, **details: Any) -> Ending:
    return Ending(replace(GOOD, done=3, failure=failure, closed=10.2, **details))


OWN = raised("InjectedError", ours=False)
REMOTE = raised(rank=1, cause="InjectedError")


@pytest.mark.parametrize(
    ("kind", "first", "second", "words"),
    [
        ("exception", failing(REMOTE), failing(OWN), ""),
        ("exception", failing(raised(rank=0, cause="InjectedError")), failing(OWN), "rank 0: expected Remote"),
        ("exception", failing(raised(rank=1, cause="LdtError")), failing(OWN), "rank 0: expected Remote"),
        ("exception", failing(None), failing(OWN), "rank 0: should have raised"),
        ("exception", failing(replace(REMOTE, time=16.0)), failing(OWN), "last rank raised after 6.00 s"),
        ("exception", failing(REMOTE, leaked=["2 threads x"]), failing(OWN), "rank 0: leaked: 2 th"),
        ("exception", failing(REMOTE), failing(REMOTE), "rank 1: expected InjectedError"),
        ("exception", failing(REMOTE), Ending(stack="in wait"), "rank 1: did not answer: it hung at\nin wait"),
        ("exception", failing(replace(REMOTE, time=1.0)), failing(OWN), "rank 0: closing took 9.2 s"),
        ("kill", failing(raised(rank=1)), Ending(exit_code=-9), ""),
        ("kill", failing(raised(rank=1)), Ending(exit_code=1), "rank 1: should have ended with exit code -9"),
        ("kill", failing(raised()), Ending(exit_code=-9), "rank 0: expected RemoteStageError of rank 1"),
        ("drop", failing(raised("TransferError")), failing(raised()), ""),
        ("drop", failing(raised("RuntimeError", ours=False)), failing(raised()), "rank 0: expected an error of ldt"),
        ("pause", Ending(GOOD), Ending(GOOD), ""),
        ("slow", Ending(GOOD), failing(raised()), "rank 1: nothing should be raised"),
        ("slow", Ending(replace(GOOD, digests={2: "other"})), Ending(GOOD), "rank 0: its weights differ"),
        ("disk_full", Ending(GOOD), Ending(GOOD), "rank 1: the save to a full disk should have raised"),
    ],
)  # fmt: skip
def test_errors_are_complaints(
    kind: FaultKind, first: Ending, second: Ending, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is the only complaint. Times are those of an idle machine."""
    monkeypatch.setattr(verdict, "in_time", lambda took, limit: took < limit)
    found = found_in(kind, [first, second])
    assert words in found
    assert bool(found) == bool(words), found


def test_a_resumed_run_must_begin_at_the_last_save() -> None:
    endings = [failing(REMOTE, tried=[2, 4], saved=[2])]
    for loaded, good in ((None, False), (2, True), (4, True), (6, False)):
        again = [Ending(replace(GOOD, loaded=loaded))]
        assert good == (not list(resumption_complaints(endings, again, [GOOD])))
    unlike = [Ending(replace(GOOD, loaded=2, digests={6: "other"}))]
    assert "its weights differ" in "".join(resumption_complaints(endings, unlike, [GOOD]))


def test_outcomes_name_their_seed_and_make_a_table() -> None:
    bad = Outcome(draw(10), 1.5, repeated=2, complaints=["rank 0: hangs"])
    with pytest.raises(FaultError, match=r"seed 10: exception on rank \d.*\nrank 0: hangs"):
        bad.check()
    assert "| exception | 2 | 1.50 s | its step and 2 before | 1 |" in table([Outcome(draw(0), 0.5), bad])
