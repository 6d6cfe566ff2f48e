"""Ctrl-C ends a waiting rank at once, whatever the other ranks are doing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ldt.testing import allowed, in_time

SECONDS = 3.0

JOB = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import ldt
from ldt.testing import ToyChunk, toy_loss, toy_microbatches

rank, where = int(sys.argv[1]), sys.argv[3]
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
topology = ldt.Topology([1], dp=3) if where == "a reduction" else ldt.Topology([1, 2])

def say(what):
    print(what, time.time(), flush=True)

def interrupt():
    say("interrupt")
    os.kill(os.getpid(), signal.SIGINT)

class Late(ToyChunk):
    calls = 0

    def forward(self, x):
        self.calls += type(x) is torch.Tensor
        if rank < 2 and self.calls == (2 if where == "a broadcast" and rank == 0 else 1):
            time.sleep(600)
        return super().forward(x)

try:
    with ldt.connect(topology) as mesh:
        torch.manual_seed(mesh.stage)
        mine = [Late(16) for _ in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        if where == "the next step" and rank < 2:
            time.sleep(600)
        if rank == 2:
            threading.Timer(2.0, interrupt).start()
        pipeline.step(toy_microbatches(3) if mesh.is_edge else None)
except KeyboardInterrupt:
    say("left")
dist.destroy_process_group()
say("end")
"""

CONNECT = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
import ldt
from ldt.runtime.comm.group_exchange import GroupExchange

rank, port = int(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
receive = GroupExchange.receive

def receive_or_stop(exchange, announced):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    receive(exchange, announced)
    print("known", flush=True)

GroupExchange.receive = receive_or_stop
try:
    ldt.connect(ldt.Topology([1, 1]), heartbeat_timeout=timedelta(seconds=float(sys.argv[3])))
except (KeyboardInterrupt, ldt.RemoteStageError) as error:
    print(type(error).__name__, str(error)[:40], "left", time.time(), flush=True)
"""


@pytest.mark.parametrize("how", ["an interrupt", pytest.param("a heartbeat", marks=pytest.mark.slow)])
def test_connect_ends_while_gloo_waits(tmp_path: Path, how: str) -> None:
    """The peer has sent its addresses and is stopped then. gloo would wait for its connections for minutes."""
    job = tmp_path / "connect.py"
    job.write_text(CONNECT)
    heartbeat = "2" if how == "a heartbeat" else "30"
    waiting = subprocess.Popen(
        [sys.executable, str(job), "0", "0", heartbeat],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    peer = subprocess.Popen([sys.executable, str(job), "1", waiting.stdout.readline(), heartbeat])
    try:
        assert waiting.stdout.readline() == "known\n"
        time.sleep(1.0)
        interrupted = time.time()
        if how == "an interrupt":
            waiting.send_signal(signal.SIGINT)
        output, errors = waiting.communicate(timeout=allowed(40))
        ended = time.time()
    finally:
        for process in (waiting, peer):
            process.kill()
            process.wait()
    error, left = output.splitlines()[-1].split("left ")
    if how == "an interrupt":
        assert error.startswith("KeyboardInterrupt")
        assert in_time(float(left) - interrupted, SECONDS)
    else:
        assert error.startswith("RemoteStageError rank 1 (stage 1, replica 0) failed first")
        assert in_time(float(left) - interrupted, 10.0)
    assert in_time(ended - float(left), SECONDS)
    assert waiting.returncode == 0, errors


@pytest.mark.parametrize(
    "where", ["the next step", "a reduction", pytest.param("a broadcast", marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_a_rank_that_waits(tmp_path: Path, where: str) -> None:
    """Rank 2 waits for the edge to begin, for gradients of replicas, or for its stage leader's broadcast."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [sys.executable, str(job)]
    busy = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), where]) for rank in range(2)]
    waiting = subprocess.Popen(
        [*command, "2", str(tmp_path / "store"), where], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = waiting.communicate(timeout=allowed(90))
        ended = time.time()
        assert [process.poll() for process in busy] == [None, None], "they were busy all the time"
    finally:
        for process in (*busy, waiting):
            process.kill()
            process.wait()
    times = {what: float(when) for what, when in map(str.split, output.splitlines())}
    assert in_time(times["left"] - times["interrupt"], SECONDS)
    assert in_time(ended - times["left"], SECONDS)
    assert waiting.returncode == 0
