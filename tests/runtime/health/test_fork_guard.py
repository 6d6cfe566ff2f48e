"""Forked children of a rank with a mesh can work, and do not touch the parent's mesh."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch.utils.data import DataLoader

import ldt
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
TOPOLOGY = Topology([1, 1])
BATCH = toy_microbatches(2)
SECONDS = 20.0


def in_child(act: Callable[[], object]) -> str:
    """The result or error of ``act`` in a forked child that exits right afterwards."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(act())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        text = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"the child ended with {status}"


# -- calls -------------------------------------------------------------------------------------------------------


def leaving(mesh: ldt.Mesh, error: BaseException | None) -> str:
    try:
        with mesh:
            if error is not None:
                raise error
    except ValueError:
        return "as it was"
    return "as it was"


def calls_in_children() -> dict[str, str]:
    """One child for each call; then the parent goes on."""
    chunks = toy_chunks(TOPOLOGY)
    found: dict[str, str] = {}
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        step_and_compare(mesh, pipeline, chunks, BATCH)
        [lane, *_] = mesh.all_lanes()
        kept = lane.empty([4], torch.float32)
        batch = BATCH if mesh.is_edge else None
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: pipeline.step(batch),
            "eval": lambda: pipeline.eval(batch),
            "validate": lambda: pipeline.validate(batch),
            "Pipeline": lambda: build(mesh, chunks),
            "clip": lambda: ldt.clip_grad_norm_(pipeline.parameters(), 1.0, mesh),
            "save": lambda: ldt.save_checkpoint("never", pipeline, step=1),
            "load": lambda: ldt.load_checkpoint("never", pipeline),
            "close": mesh.close,
            "reconnect": mesh.reconnect,
            "control": lambda: mesh.control.all_gather(None),
            "tp_mesh": lambda: mesh.tp_mesh,
            "connect": lambda: ldt.connect(TOPOLOGY),
            "send": lambda: lane.send([torch.ones(4)], 1),
            "recv": lambda: lane.recv([torch.ones(4)], 1),
            "abort": lambda: lane.abort("no"),
            "lane.close": lane.close,
            "empty": lambda: lane.empty([4], torch.float32),
            "buffers": lambda: lane.buffers([[4], [5]], [torch.float32, torch.int64]),
            "stats": lane.stats,
            "with": lambda: leaving(mesh, None),
            "with an error": lambda: leaving(mesh, ValueError("no")),
            "collector": gc.collect,
            "exits": lambda: __import__("atexit")._run_exitfuncs(),
        }
        if mesh.is_edge:
            found = {name: in_child(call) for name, call in calls.items()}
            found["free"] = in_child(lambda: (calls.clear(), locals().clear(), gc.collect()))
            del kept
        step_and_compare(mesh, pipeline, chunks, BATCH)
        ours = f"process {os.getpid()}"
    return {name: text.replace(ours, "process N") for name, text in found.items()}


def test_calls_in_a_child_are_refused(pool: RankPool) -> None:
    found = pool.run(calls_in_children)[0]
    quiet = {"with", "with an error", "collector", "exits", "free"}
    for name, text in found.items():
        if name in quiet:
            assert not text.startswith("the child ended"), (name, text)
            assert "Error" not in text, (name, text)
        else:
            assert "belongs to process N, this is process " in text, (name, text)
            assert "a forked child: use it where it was made" in text, (name, text)


def forks_in_a_step(how: str) -> None:
    """A chunk's forward forks while transfers and threads are running; the child raises."""
    status: list[int] = []
    parent = os.getpid()

    class Forking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and how and not status:
                pid = os.fork()
                if pid == 0:
                    raise SystemExit(0) if how == "exit" else ValueError("of the child")
                status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return super().forward(x)

    chunks = [torch.nn.Linear(16, 16), Forking(16, 16), torch.nn.Linear(16, 16)]
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        try:
            pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
        except BaseException as error:
            if os.getpid() == parent:
                raise
            os._exit(7 if isinstance(error, (SystemExit, ValueError)) else 8)
        assert status == ([] if mesh.is_edge else [7])
        pipeline.step(toy_microbatches(4) if mesh.is_edge else None)


@pytest.mark.parametrize("how", ["exit", "error"])
def test_an_error_of_a_child_does_not_fail_the_mesh(pool: RankPool, how: str) -> None:
    pool.run(forks_in_a_step, how)


def busy_forks() -> list[str]:
    """One thread forks children while another runs steps."""
    chunks = toy_chunks(TOPOLOGY)
    answers: list[str] = []
    over = threading.Event()

    def fork_on() -> None:
        while not over.is_set():
            answers.append(in_child(lambda: (gc.collect(), "done")[1]))
            answers.append(in_child(lambda: pipeline.step(None)))

    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        thread = threading.Thread(target=fork_on)
        thread.start()
        for _ in range(10):
            step_and_compare(mesh, pipeline, chunks, BATCH)
        over.set()
        thread.join()
    return answers


def test_forks_while_steps_run(pool: RankPool) -> None:
    for answers in pool.run(busy_forks):
        assert answers
        assert all(text == "done" or "this mesh belongs to process " in text for text in answers), answers


# -- work --------------------------------------------------------------------------------------------------------


def doubled(number: int) -> int:
    return 2 * number


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4, 16), float(index))


def with_workers() -> float:
    """A step on microbatches from DataLoader workers that start within it, and a process pool."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # which may have none
    torch.manual_seed(0)
    chunks = toy_chunks(TOPOLOGY)
    context = multiprocessing.get_context("fork")
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        loader = DataLoader(Samples(), batch_size=None, num_workers=2, multiprocessing_context=context)
        result = pipeline.step(((x, x) for x in loader) if mesh.is_edge else None)
        with context.Pool(2) as workers:
            assert workers.map(doubled, range(8)) == list(range(0, 16, 2))
        step_and_compare(mesh, pipeline, chunks, [(Samples()[i], Samples()[i]) for i in range(8)])
        return float(result.loss) if result.loss is not None else 0.0


def test_workers_are_forked(pool: RankPool) -> None:
    assert pool.run(with_workers)[0] > 0


# -- ends --------------------------------------------------------------------------------------------------------

_SCRIPT = """
import gc, json, os, sys
import torch, torch.distributed as dist
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches

torch.set_num_threads(1)
dist.init_process_group("gloo")
topology = ldt.Topology([1, 1])
mesh = ldt.connect(topology)
chunks = [toy_chunks(topology)[index] for index in topology.chunks_of(mesh.stage)]
pipeline = ldt.Pipeline(chunks, mesh, loss_fn=toy_loss)
batch = toy_microbatches(2) if mesh.is_edge else None
pipeline.step(batch)
children = []
for how in ("exits", "collects", "fails"):
    pid = os.fork()
    if pid == 0:
        if how == "collects":
            del mesh, pipeline
            gc.collect()
        if how == "fails":
            raise ValueError("of the child")
        sys.exit(0)
    children.append(pid)
pipeline.step(batch)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
pipeline.step(batch)
mesh.close()
dist.destroy_process_group()
print(json.dumps(ends))
"""


def test_children_exit_normally(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for output, _ in outputs:
        assert json.loads(output.splitlines()[-1]) == [0, 0, 1]
