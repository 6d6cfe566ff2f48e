"""A failure frees a rank whose GPU waits for a collective of its stage that another rank never joins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from two_ranks import first_of_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

JOB = """
import json, os, signal, sys, time, torch, torch.distributed as dist
import ldt
from ldt.testing import ToyChunk, toy_loss, toy_microbatches

rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
armed = False

class Summing(ToyChunk):
    def forward(self, x):
        if type(x) is torch.Tensor:
            if armed and rank == 1 and case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if armed and rank == 1:
                raise ValueError("no more")
            dist.all_reduce(total := x.sum(), group=mesh.tp_mesh.get_group())
            total.item()
        return super().forward(x)

mesh = ldt.connect(ldt.Topology([2]), device=device)
torch.manual_seed(0)
chunks = [Summing(16).to(device) for _ in range(2)]
pipeline = ldt.Pipeline(chunks, mesh, loss_fn=toy_loss)
batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(2)]
pipeline.step(batch)
armed = True
start = time.monotonic()
try:
    pipeline.step(batch)
except Exception as error:
    print(json.dumps([type(error).__name__, getattr(error, "rank", None), time.monotonic() - start, str(error)]))
start = time.monotonic()
mesh.close()
torch.cuda.synchronize()
print(json.dumps(time.monotonic() - start), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("case", ["raise", "kill"])
def test_a_failure_ends_a_collective_on_the_device(tmp_path: Path, case: str) -> None:
    """It raises within seconds, and the mesh closes."""
    said = first_of_two(JOB, tmp_path, str(tmp_path), case)
    raised, closing = map(json.loads, said.splitlines())
    kind, named, seconds, text = raised
    assert (kind, named) == ("RemoteStageError", 1), text
    assert ("no heartbeat" in text) == (case == "kill")
    assert seconds < 5.0
    assert closing < 5.0
