"""A device-side assertion on one rank: all ranks raise, all lanes end, and both processes exit on their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import two_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

JOB = """
from ldt.testing import ToyChunk, toy_loss, toy_microbatches

class Asserting(ToyChunk):
    armed = False

    def forward(self, x):
        if self.armed and type(x) is torch.Tensor:
            x[torch.tensor([10**6], device=x.device)]
        return super().forward(x)

topology = ldt.Topology([1, 1])
mesh = ldt.connect(topology, transport=sys.argv[3], device=device)
torch.manual_seed(0)
chunks = [Asserting(16).to(device) for _ in topology.chunks_of(mesh.stage)]
pipeline = ldt.Pipeline(chunks, mesh, loss_fn=toy_loss)
batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(8)] if mesh.is_edge else None
pipeline.step(batch)
lanes = mesh.all_lanes()
Asserting.armed = rank == 1
try:
    for _ in range(3):
        pipeline.step(batch)
        torch.cuda.synchronize()
    say(["nothing", ""])
except Exception as error:
    say([type(error).__name__, str(error)])
refused = 0
for lane in lanes:
    try:
        lane.recv([torch.ones(1)], 1 - rank)
    except ldt.LaneError as error:
        refused += "has failed" in str(error) or "failed first" in str(error)
say([refused, len(lanes)])
mesh.close()
"""


@pytest.mark.parametrize("transport", ["copy_engine", "host", "nccl", "c10d"])
def test_all_ranks_end(tmp_path: Path, transport: str) -> None:
    ranks = two_ranks(JOB, tmp_path, transport, seconds=60)
    for number, rank in enumerate(ranks):
        lines = [json.loads(line) for line in rank.output.splitlines()]
        assert len(lines) == 2, f"{rank.output} {rank.complaint[-3000:]}"
        (kind, text), (refused, lanes) = lines
        assert (kind == "RemoteStageError") == (number == 0), text
        assert "assert" in text
        assert refused == lanes > 0
        assert rank.status is not None, "it did not exit"
