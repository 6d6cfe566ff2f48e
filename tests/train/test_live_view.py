"""The live view: what it shows of a run, that it sends nothing, and that its failures end nothing but itself."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ldt
from ldt.plan import Costs
from ldt.runtime.health import heartbeat
from ldt.testing import RankPool, SleepingChunk, toy_loss, toy_microbatches
from ldt.topology import Topology
from ldt.train import live_view

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
MICROBATCHES = 4
LONG = 20.0


@contextmanager
def connected(chunk_seconds: float = 0.01) -> Iterator[tuple[ldt.Pipeline, Any, pytest.MonkeyPatch]]:
    """A pipeline of slow chunks, its batch, and a view that looks and draws often."""
    torch.manual_seed(0)
    chunks = [SleepingChunk(16, chunk_seconds, chunk_seconds / 2) for _ in range(TOPOLOGY.num_chunks)]
    with ldt.connect(TOPOLOGY) as mesh, pytest.MonkeyPatch.context() as patch:
        for module, name in ((heartbeat, "_LOOK_SECONDS"), (live_view, "_REFRESH_SECONDS")):
            patch.setattr(module, name, 0.05)
        patch.setattr(live_view, "_LOG_SECONDS", 0.1)
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        yield pipeline, toy_microbatches(MICROBATCHES) if mesh.is_edge else None, patch


def terminal() -> Any:
    from rich.console import Console

    return Console(record=True, file=io.StringIO(), force_terminal=True, width=160)


def shown(leads: bool) -> tuple[str, float]:
    """What is drawn during four steps or more, until all ranks were seen in an action, and the last loss."""
    with connected() as (pipeline, batch, _):
        mesh, console = pipeline.mesh, terminal()
        costs = Costs(forward=1.0, backward=2.0, bandwidth={"up": 1e6, "down": 2e6}, bytes=1)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3)
        if leads and not mesh.is_edge:
            ldt.follow(pipeline, optimizer)
            return "", 0.0
        leader = ldt.Leader(pipeline, optimizer) if leads else None
        with ldt.LiveView(pipeline, costs, console=console) as view:
            for _ in range(8):
                result = pipeline.step(batch) if leader is None else leader.step(batch)
                view.update(result, tokens=1000)
        if leader is not None:
            leader.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "ldt-live"]
        return console.export_text(), 0.0 if result.loss is None else float(result.loss)


@pytest.mark.parametrize("leads", [False, True])
def test_a_run_is_shown(pool: RankPool, leads: bool) -> None:
    (text, loss), *others = pool.run(shown, leads)
    assert [text for text, _ in others] == ["", ""], "only rank 0 draws"
    last = text[text.rindex("step 8") :]
    first, header, up, down, ranks, *rows = last.splitlines()
    assert f"loss {loss:.4g}" in first
    for part in (" s/step", " tokens/s", "bubble "):
        assert part in first
    assert header.split() == ["link", "in", "use"]
    assert up.startswith("0 to 1")
    assert down.startswith("1 to 0")
    assert "% of the bandwidth)" in up
    assert ranks.split() == ["rank", "node", "busy", "doing"]
    assert [row.split()[:2] for row in rows[:3]] == [["0", "0.0"], ["1", "1.0"], ["2", "2.0"]]
    for rank in range(3):
        assert any(
            line.split()[:2] == [str(rank), f"{rank}.0"]
            and re.search(rf"\b{chunk}[A-Z_]+\d \(\d+ of \d+\)", line)
            for line in text.splitlines()
            for chunk in TOPOLOGY.chunks_of(rank)
        ), f"rank {rank} was seen in an action"


def logged() -> list[str]:
    """Without a terminal: lines at level INFO."""
    with connected() as (pipeline, batch, patch):
        lines: list[str] = []
        patch.setattr(live_view.logger, "info", lambda text, *args: lines.append(text % args))
        with ldt.LiveView(pipeline) as view:
            for _ in range(4):
                view.update(pipeline.step(batch))
        return lines


def test_lines_are_logged_without_a_terminal(pool: RankPool) -> None:
    lines, *others = pool.run(logged)
    assert others == [[], []]
    assert len(lines) >= 2
    assert lines[-1].startswith("step 4, loss ")
    assert "0 to 1 " in lines[-1]
    assert "kB/s" in lines[-1]
    assert "bandwidth" not in lines[-1], "it is not known"


def broken(where: str) -> tuple[list[str], int]:
    """Warnings, and steps that were run, with a view in which something fails."""
    with connected() as (pipeline, batch, patch):
        warned: list[str] = []
        patch.setattr(
            live_view.logger, "warning", lambda text, *args: warned.append(text % args if args else text)
        )

        def fail(*args: Any) -> Any:
            raise ZeroDivisionError("it cannot be drawn")

        if where == "rich":
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            patch.setitem(sys.modules, "rich.live", None)
        else:
            patch.setattr(live_view, where, fail)
        console = None if where == "rich" else terminal()
        with ldt.LiveView(pipeline, console=console) as view:
            for _ in range(4):
                result = pipeline.step(batch)
                view.update(result)
        return warned, len(result.stats.entries)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("table_of", "the live view has ended: ZeroDivisionError: it cannot be drawn"),
        ("scalars", "the live view has ended: ZeroDivisionError: it cannot be drawn"),
        ("rich", "the live view needs rich: pip install 'ldt-torch[live]'; it logs lines instead"),
    ],
)
def test_what_fails_in_it_ends_nothing_else(pool: RankPool, where: str, expected: str) -> None:
    (warned, entries), *others = pool.run(broken, where)
    assert warned == [expected]
    assert entries > 0
    assert [text for text, _ in others] == [[], []]


def child_prints() -> bool:
    """Whether a process that is forked while the view draws can print."""
    with connected() as (pipeline, batch, _):
        if pipeline.mesh.rank != 0:
            for _ in range(2):
                pipeline.step(batch)
            return True
        before = sys.stdout
        with ldt.LiveView(pipeline, console=terminal()) as view:
            view.update(pipeline.step(batch))
            assert sys.stdout is not before, "rich prints above what it draws"
            with view._live._lock:  # as if it were drawing now
                child = os.fork()
                if child == 0:
                    print("a worker says so", flush=True)
                    os._exit(0 if sys.stdout is before else 1)
            deadline = time.monotonic() + LONG
            ended, status = 0, 1
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.02)
            if not ended:
                os.kill(child, 9)
                os.waitpid(child, 0)
            view.update(pipeline.step(batch))
        assert sys.stdout is before
        return bool(ended) and status == 0


def test_a_worker_that_is_forked_prints(pool: RankPool) -> None:
    assert pool.run(child_prints) == [True] * 3


def sent(shows: bool) -> list[int]:
    """Bytes that the control messages and lanes of this rank carry in two steps."""
    with connected(0.0) as (pipeline, batch, _):
        mesh = pipeline.mesh
        view = ldt.LiveView(pipeline, console=terminal()) if shows else None
        lanes = [*mesh.all_lanes(), *mesh.edge_broadcast.lanes()]
        before = [int(lane.stats()["sent_bytes"]) for lane in lanes]
        for _ in range(2):
            result = pipeline.step(batch)
            if view is not None:
                view.update(result)
        after = [int(lane.stats()["sent_bytes"]) for lane in lanes]
        if view is not None:
            view.close()
            view.close()
        return [end - start for start, end in zip(before, after, strict=True)]


def test_it_sends_nothing_in_a_step(pool: RankPool) -> None:
    assert pool.run(sent, True) == pool.run(sent, False)


def reopened() -> None:
    with connected() as (pipeline, _, _):
        first = ldt.LiveView(pipeline)
        second = ldt.LiveView(pipeline)
        heartbeats = pipeline.mesh.detector.heartbeats
        watched = heartbeats.on_look
        first.close()
        assert heartbeats.on_look == watched
        second.close()
        assert heartbeats.on_look is None


def test_a_view_that_is_closed_late_leaves_the_next_one(pool: RankPool) -> None:
    pool.run(reopened)
