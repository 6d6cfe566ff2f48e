"""Training with NCCL as the default process group, bound to a device or not. Skipped without two GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

JOB = """
import os, sys, torch, torch.distributed as dist
import ldt
from ldt.testing import toy_chunks, toy_loss, toy_microbatches, unsplit_step

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device if sys.argv[1] == "bound" else None)
topology = ldt.Topology([1, 1])
chunks = [chunk.to(device) for chunk in toy_chunks(topology, width=64)]
microbatches = [(x.to(device), y.to(device)) for x, y in toy_microbatches(6, width=64)]
losses, reference = unsplit_step(chunks, microbatches, toy_loss)
with ldt.connect(topology) as mesh:
    mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
    result = pipeline.step(microbatches if mesh.is_edge else None)
    for index in topology.chunks_of(mesh.stage):
        for got, expected in zip(chunks[index].parameters(), reference[index].parameters()):
            assert torch.equal(got.grad, expected.grad)
    if mesh.is_edge:
        assert all(map(torch.equal, result.losses, losses))
        print("equal", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("binding", ["bound", "unbound"])
def test_nccl_as_the_default_group(tmp_path: Path, binding: str) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(job), binding], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
