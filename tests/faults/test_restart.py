"""Tests that torchrun restarts a job from its last checkpoint after a rank was killed, to bit-equal weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import ldt
from ldt.testing.models import unsplit_training
from ldt.topology import Topology

TOPOLOGY = Topology([1, 1, 1])
STEPS = 7
MICROBATCHES = 3
_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches

steps, microbatches, folder, results = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def kill(*unused):
    os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
# The store outlives an attempt and keeps addresses of dead processes: each attempt needs its own key prefix.
store, rank, world_size = next(rendezvous("env://"))
store = dist.PrefixStore(f"attempt-{attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
topology = ldt.Topology([1, 1, 1])
with ldt.connect(topology) as mesh:
    chunks = toy_chunks(topology)
    mine = {index: chunks[index] for index in topology.chunks_of(mesh.stage)}
    pipeline = ldt.Pipeline(list(mine.values()), mesh, loss_fn=toy_loss if mesh.is_edge else None)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    loaded = ldt.load_checkpoint(folder, pipeline, optimizer)
    start = 0 if loaded is None else loaded.step
    (results / f"attempt-{attempt}").write_text(str(start))
    for step in range(start, steps):
        if attempt == 0 and step == 5 and rank == 1:
            chunks[1].register_full_backward_hook(kill)
        pipeline.step(toy_microbatches(microbatches, seed=step) if mesh.is_edge else None)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:
            ldt.save_checkpoint(folder, pipeline, optimizer, step=step + 1, position=step + 1)
    for index, chunk in mine.items():
        torch.save(chunk.state_dict(), results / f"chunk-{index}.pt")
dist.destroy_process_group()
"""


def torchrun(script: Path, *arguments: str) -> None:
    """Run a script on three ranks, with at most two restarts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
    command += ["--nproc-per-node", "3", "--monitor-interval", "0.1", str(script), *arguments]
    quick = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        command, env={**os.environ, **quick}, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(not hasattr(ldt, "save_checkpoint"), reason="needs ldt.save_checkpoint")
@pytest.mark.slow
def test_torchrun_restarts_a_job_from_its_last_checkpoint(tmp_path: Path) -> None:
    script, checkpoints, results = tmp_path / "train.py", tmp_path / "checkpoints", tmp_path / "results"
    script.write_text(_SCRIPT)
    checkpoints.mkdir()
    results.mkdir()
    torchrun(script, str(STEPS), str(MICROBATCHES), str(checkpoints), str(results))
    starts = [(results / f"attempt-{attempt}").read_text() for attempt in range(2)]
    assert starts == ["0", "4"]
    assert not (results / "attempt-2").exists()
    for index, chunk in enumerate(unsplit_training(TOPOLOGY, STEPS, MICROBATCHES)):
        weights = torch.load(results / f"chunk-{index}.pt")
        for name, tensor in chunk.state_dict().items():
            assert torch.equal(weights[name], tensor), f"chunk {index}, {name}"
