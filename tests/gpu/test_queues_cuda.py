"""Hardware queues of CUDA: with enough of them steps complete over every transport; with too few, connect raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import two_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

JOB = """
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(x)

topology = ldt.Topology([1, 1], laps=int(sys.argv[3]))
for transport in ("copy_engine", "nccl", "c10d", "auto"):
    try:
        mesh = ldt.connect(topology, transport=transport, device=device)
    except ldt.LdtError as error:
        say([transport, str(error)])
        continue
    torch.manual_seed(0)
    chunks = [Residual().to(device) for _ in topology.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(chunks, mesh, loss_fn=nn.functional.mse_loss)
    batch = [(torch.rand(8, 64, device=device), torch.rand(8, 64, device=device)) for _ in range(8)]
    for _ in range(2):
        pipeline.step(batch if mesh.is_edge else None)
    torch.cuda.synchronize()
    mesh.close()
    say([transport, "ended"])
os._exit(0)
"""


AGAIN = """
closed = []
for _ in range(10):
    mesh = ldt.connect(ldt.Topology([1, 1]), transport="copy_engine", device=device)
    mesh.close()
    closed.append(mesh)
say(len(closed))
os._exit(0)
"""


def said(folder: Path, laps: int, connections: str | None) -> list[dict[str, str]]:
    ranks = two_ranks(JOB, folder, str(laps), seconds=90, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    for rank in ranks:
        assert rank.status == 0, f"{rank.status}: {rank.output} {rank.complaint[-3000:]}"
    return [dict(map(json.loads, rank.output.splitlines())) for rank in ranks]


@pytest.mark.parametrize(("laps", "connections"), [(1, "8"), (2, None)], ids=["eight", "not said, two laps"])
def test_steps_end_with_enough_of_them(tmp_path: Path, laps: int, connections: str | None) -> None:
    for answers in said(tmp_path, laps, connections):
        assert answers == dict.fromkeys(("copy_engine", "nccl", "c10d", "auto"), "ended")


@pytest.mark.parametrize(("laps", "connections"), [(1, "1"), (2, "8")], ids=["one", "eight, two laps"])
def test_connect_refuses_too_few_by_name(tmp_path: Path, laps: int, connections: str) -> None:
    for answers in said(tmp_path, laps, connections):
        assert set(answers) == {"copy_engine", "nccl", "c10d", "auto"}
        for text in answers.values():
            assert "hardware queues" in text
            assert f"CUDA_DEVICE_MAX_CONNECTIONS gives it {connections}: restart it" in text
            assert "Megatron-LM" in text


def test_a_closed_mesh_takes_no_queue(tmp_path: Path) -> None:
    """Each has four lanes, and there are 32 streams."""
    for rank in two_ranks(AGAIN, tmp_path, seconds=90, CUDA_DEVICE_MAX_CONNECTIONS=None):
        assert rank.output.split() == ["10"], rank.complaint[-3000:]
