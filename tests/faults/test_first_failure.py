"""Tests that after a rank of the middle stage fails or is killed, the others name it and all processes exit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from ldt.testing import allowed, in_time

WORLD_SIZE = 3
RAISE_SECONDS = 5.0
EXIT_SECONDS = 60.0  # includes importing torch on a busy machine
_SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import ldt
from ldt.testing import ToyChunk, toy_loss, toy_microbatches

rank, where, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
armed = False


class BoomError(Exception):
    pass


def note(name, **facts):
    with open(f"{folder}/{name}-{rank}.json", "w") as file:
        json.dump({"time": time.monotonic(), **facts}, file)


def fail():
    note("failed")
    if where == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise BoomError("no more")


class Middle(ToyChunk):
    calls = 0

    def forward(self, x):
        if armed and type(x) is torch.Tensor:
            self.calls += 1
            if where != "backward" and self.calls == 3:
                fail()
            if where == "backward":
                x.register_hook(lambda grad: fail())
        return super().forward(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
topology = ldt.Topology([1, 1, 1])
with ldt.connect(topology) as mesh:
    kinds = [Middle if mesh.stage == 1 else ToyChunk] * len(topology.chunks_of(mesh.stage))
    torch.manual_seed(mesh.stage)
    pipeline = ldt.Pipeline([kind(16) for kind in kinds], mesh, loss_fn=toy_loss if mesh.is_edge else None)
    batch = toy_microbatches(4) if mesh.is_edge else None
    pipeline.step(batch)
    armed = True
    try:
        pipeline.step(batch)
    except Exception as error:
        note("raised", kind=type(error).__name__, rank=getattr(error, "rank", rank), text=str(error))
        raise
dist.destroy_process_group()
"""


def run(script: Path, where: str, folder: Path) -> list[tuple[int, str]]:
    """Return exit code and standard error of each rank; rank 0 hosts the store, as under `env://`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    quick = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), where, str(folder)],
            env={**os.environ, **address, **quick, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that orphans can be found
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=allowed(EXIT_SECONDS))[1] for rank in ranks]
        assert [rank.pid for rank in ranks if is_session(rank.pid)] == [], "processes are left behind"
    finally:
        for rank in ranks:
            if rank.poll() is None or is_session(rank.pid):
                os.killpg(rank.pid, signal.SIGKILL)
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def is_session(number: int) -> bool:
    """Whether the session has a live process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == number:
            return True
    return False


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward", "kill"])
def test_every_rank_names_the_first_failure_and_exits(tmp_path: Path, where: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    endings = run(script, where, tmp_path)
    failed: dict[str, Any] = json.loads((tmp_path / "failed-1.json").read_text())
    codes = [code for code, _ in endings]
    assert codes == [1, -signal.SIGKILL if where == "kill" else 1, 1], endings
    for rank in (0, 2):
        raised: dict[str, Any] = json.loads((tmp_path / f"raised-{rank}.json").read_text())
        assert (raised["kind"], raised["rank"]) == ("RemoteStageError", 1), raised["text"]
        assert in_time(raised["time"] - failed["time"], RAISE_SECONDS)
        assert "rank 1 (stage 1, replica 0) failed first" in raised["text"]
        if where != "kill":
            action = "F2" if where == "forward" else "B0"
            assert f"action 1{action}" in raised["text"]
            assert "BoomError: no more" in raised["text"]
        assert "RemoteStageError" in endings[rank][1]
    if where != "kill":
        assert "BoomError: no more" in endings[1][1]
