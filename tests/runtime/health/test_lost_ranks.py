"""The other ranks name a rank that is stopped, hung, outside any call, or late."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from acting_jobs import caught_in_a_step, chunks_doing
from pipeline_jobs import build

import ldt
from ldt.testing import RankError, RankPool, in_time, paced, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
LIMIT = paced(1.5)
LONG = paced(5.0).total_seconds()  # by then a hung rank is detected


# -- stopped and hung ------------------------------------------------------------------------------------------------


def stopped() -> tuple[int | None, str, float]:
    """Rank 1 is stopped in its step, and resumes after the others have raised."""
    topology = Topology([1, 1, 1])
    with ldt.connect(topology, ranks=range(3), heartbeat_timeout=LIMIT) as mesh:
        pid = mesh.control.all_gather(os.getpid())[1]
        found = caught_in_a_step(
            mesh, chunks_doing(topology, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        )
    if mesh.rank == 2:
        os.kill(pid, signal.SIGCONT)
    return found


def killed_meanwhile() -> None:
    """A rank is killed while no rank waits for it on the host, as on devices, where hosts wait only for streams."""
    with ldt.connect(Topology([1, 2, 1])) as mesh:
        if mesh.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        report = mesh.watchdog.wait(60.0)
        assert report is not None
        assert report.rank == 2
        assert "no heartbeat for 1.5 s" in report.error
        assert "whose connections were closed" in report.error
        assert in_time(time.monotonic() - start, 5.0)


def test_a_dead_rank_that_no_rank_waits_for_is_detected(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(killed_meanwhile)
    assert str(caught.value) == "rank 2 died with exit code -9"


def test_a_stopped_rank_is_named_and_learns_of_it(pool: RankPool) -> None:
    answers = pool.run(stopped, ranks=range(3))
    for rank, (named, text, seconds) in enumerate(answers):
        assert "rank 1 (stage 1, replica 0) failed first" in text
        assert "no heartbeat" in text
        assert in_time(seconds, 8.0)
        assert rank == 1 or named == 1


def stopped_cloud(outage: timedelta) -> str:
    """The text that the edge raises if all ranks of the other site are stopped."""
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2), heartbeat_timeout=LIMIT, outage=outage) as mesh:
        pid = mesh.control.all_gather(os.getpid())[1]
        text = caught_in_a_step(
            mesh, chunks_doing(topology, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        )[1]
        if mesh.is_edge:
            os.kill(pid, signal.SIGCONT)
    return text


def test_a_silent_site_is_a_link_only_where_links_may_be_down(pool: RankPool) -> None:
    text = pool.run(stopped_cloud, timedelta(0), ranks=range(2))[0]
    assert "rank 1 (stage 1, replica 0) failed first: no heartbeat" in text
    text = pool.run(stopped_cloud, timedelta(seconds=1), ranks=range(2))[0]
    assert "the link between site 0 and site 1 has been down since" in text
    assert "or all ranks there are gone" in text


def hung(chunk: int, share: bool) -> tuple[int | None, str, float, list[str]]:
    """One chunk takes far too long, on a rank that can still report it."""
    topology = Topology([1, 1, 1])
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ldt").addHandler(handler)
    with ldt.connect(topology, ranks=range(3), stall_timeout=LIMIT, share_edge_errors=share) as mesh:
        found = caught_in_a_step(mesh, chunks_doing(topology, chunk, lambda: time.sleep(LONG)))
    logging.getLogger("ldt").removeHandler(handler)
    return *found, [r.getMessage() for r in records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(("chunk", "share"), [(0, False), (0, True), (1, False)])
def test_a_hung_rank_reports_where_it_hangs(pool: RankPool, chunk: int, share: bool) -> None:
    """Each leader has logged one status report of all nodes."""
    answers = pool.run(hung, chunk, share, ranks=range(3))
    for rank, (named, text, seconds, warnings) in enumerate(answers):
        assert rank == chunk or named == chunk, text
        assert f"failed first in action {chunk}F0" in text
        assert re.search(r"no progress for \d+ s: it is at", text)
        assert "test_lost_ranks.py" in text
        stack = "time.sleep(LONG)" in text
        assert stack == (share or chunk > 0), "the edge shares source lines only with share_edge_errors"
        assert rank == chunk or in_time(seconds, LONG - 0.1)
        [report] = warnings
        assert re.search(r"has made no progress for \d+ s in step\(\) \(call 2\)", report)
        assert f"rank {chunk} (stage {chunk}, replica 0): in step() (call 2), action {chunk}F0" in report
        assert f">{chunk}F0<" in report
        if chunk == 1:
            assert "rank 0 (stage 0, replica 0): in step() (call 2)" in report
            assert "waiting for F2 microbatch 0 on channel F2:2.0->0.0 from rank 2" in report


def away(who: int) -> tuple[int | None, str]:
    """One rank is outside any call while the others are in a step."""
    topology = Topology([1, 1, 1])
    with ldt.connect(topology, ranks=range(3), stall_timeout=LIMIT) as mesh:
        pipeline = build(mesh, toy_chunks(topology))
        if mesh.rank == who:
            mesh.watchdog.wait(60.0)
        with pytest.raises(ldt.LdtError) as caught:  # noqa: PT012
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return getattr(caught.value, "rank", None), str(caught.value)


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_outside_any_call_is_named(pool: RankPool, who: int) -> None:
    for rank, (named, text) in enumerate(pool.run(away, who, ranks=range(3))):
        assert rank == who or named == who, text
        assert f"rank {who} (stage {who}, replica 0) failed first in the code between calls" in text
        assert "while others wait: it was last seen outside any call" in text
        assert "pass connect on all ranks a stall_timeout longer than " in text


# -- one transfer takes too long -------------------------------------------------------------------------------------


def late_transfer() -> tuple[str, str]:
    topology = Topology([1, 1, 1])
    with ldt.connect(topology, ranks=range(3), transfer_timeout=paced(1)) as mesh:
        chunks = chunks_doing(topology, 1, lambda: time.sleep(paced(3).total_seconds()))
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
        return type(caught.value).__name__, str(caught.value)


def test_an_overdue_transfer_is_reported_in_full(pool: RankPool) -> None:
    """The message, the channel, both ranks, the time, and the last status of every rank."""
    answers = dict(pool.run(late_transfer, ranks=range(3)))
    assert set(answers) == {"TransferError", "RemoteStageError"}
    text = answers["TransferError"]
    for words in (
        "failed first in action ",
        "microbatch 0 from rank ",
        " of float32[4, 16] (256 bytes) failed after ",
        "The ranks' last status:",
        "rank 1 (stage 1, replica 0): in step() (call 2), action 1F0",
        "chunk 1, microbatch 0, for ",
        "received last: F0 microbatch 0",
        ">1F0<",
    ):
        assert words in text
    assert text.split("failed first")[1] in answers["RemoteStageError"]


def test_invalid_timeouts() -> None:
    for name in ("timeout", "transfer_timeout", "heartbeat_timeout", "stall_timeout"):
        for seconds, got in ((0, "0:00:00"), (-2, "-1 day, 23:59:58")):
            with pytest.raises(ValueError, match=f"{name} must be .*, got {got}"):
                ldt.connect(Topology([1]), **{name: timedelta(seconds=seconds)})  # type: ignore[arg-type]
        for value in (5, 0.5, "5", None):
            with pytest.raises(TypeError, match=f"{name} must be a datetime.timedelta, got {value!r}"):
                ldt.connect(Topology([1]), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outage must be at least 0:00:00, got -1 day"):
        ldt.connect(Topology([1]), outage=timedelta(seconds=-1))
    with pytest.raises(ValueError, match=r"transfer_timeout must be longer than .* twice outage, 0:02:30,"):
        ldt.connect(Topology([1]), outage=timedelta(seconds=60), transfer_timeout=timedelta(seconds=150))
    with pytest.raises(ValueError, match=r"heartbeat_timeout must be at least 0:00:01, got 0:00:00\.9"):
        ldt.connect(Topology([1]), heartbeat_timeout=timedelta(seconds=0.9))


def closing_while_busy(busy: int) -> bool:
    """Rank 2 closes its mesh while another rank holds the GIL for longer than a liveness probe takes."""
    with ldt.connect(Topology([1, 1, 1]), ranks=range(3)) as mesh:
        if mesh.rank == 2:
            time.sleep(0.5)
            return mesh.failed
        if mesh.rank == busy:
            ctypes.PyDLL(None).usleep(3_000_000)
        report = mesh.watchdog.wait(4.0)
        assert report is None, report
    return mesh.failed


def test_a_closed_mesh_does_not_make_other_ranks_suspect(pool: RankPool) -> None:
    assert pool.run(closing_while_busy, 1, ranks=range(3)) == [False] * 3


def forked_child() -> None:
    """A child of the killed rank keeps its sockets open and lives on; another child exits normally."""
    with ldt.connect(Topology([1, 1, 1]), ranks=range(3)) as mesh:
        if mesh.rank == 1:
            if os.fork() == 0:
                time.sleep(paced(8).total_seconds())
                os._exit(0)
            if os.fork() == 0:
                atexit._run_exitfuncs()
                os._exit(0)
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        report = mesh.watchdog.wait(60.0)
        assert report is not None
        assert report.rank == 1
        assert "no heartbeat" in report.error
        seconds = time.monotonic() - start
        assert seconds > 1.0
        assert in_time(seconds, 6.0)


def test_children_do_not_keep_a_dead_rank_alive(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(forked_child, ranks=range(3))
    assert str(caught.value) == "rank 1 died with exit code -9"


def test_waits_have_a_duration() -> None:
    """A mesh of one rank has no neighbour to check, and is not reported hung between its calls."""
    with ldt.connect(Topology([1]), stall_timeout=timedelta(seconds=0.2)) as mesh:
        assert mesh.watchdog.wait(1.0) is None
        with mesh.calling("step()"), mesh.detector.progress.waiting("a tea"):
            time.sleep(0.3)
            seen: Any = mesh.detector.progress.status()
        waited = re.search(r"in step\(\) \(call 1\), waiting for a tea, for (\d+\.\d) s", seen.describe())
        assert waited is not None
        assert float(waited[1]) >= 0.3
