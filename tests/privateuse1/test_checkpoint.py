"""Checkpoints on the test device are ordered with the current stream, both when saving and when loading."""

from __future__ import annotations

from pathlib import Path

import npu
import torch
from torch import nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 2])
WIDTH = 16


def job(mesh: ldt.Mesh, seed: int) -> tuple[ldt.Pipeline, torch.optim.Optimizer]:
    chunks = [chunk.to(mesh.device) for chunk in toy_chunks(TOPOLOGY, WIDTH, seed)]
    mine: list[nn.Module] = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
    return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.01)


def train(pipeline: ldt.Pipeline, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = [
        (x.to(pipeline.mesh.device), y.to(pipeline.mesh.device))
        for x, y in toy_microbatches(3, WIDTH, seed=seed)
    ]
    pipeline.step(batch if pipeline.mesh.is_edge else None)
    optimizer.step()
    optimizer.zero_grad()


def resumed(path: Path) -> int:
    with npu.late(4, 500) as device:
        worker_stream = torch.accelerator.current_stream()  # of the device; checkpoints use it
        with torch.Stream(device), ldt.connect(TOPOLOGY, "hccl") as mesh:
            pipeline, optimizer = job(mesh, 0)
            train(pipeline, optimizer, 1)
            npu.sleep(300)  # the values to save are not computed yet
            add_to(pipeline, 1)
            ldt.save_checkpoint(path, pipeline, optimizer, step=1)
            train(pipeline, optimizer, 2)
            again, other = job(mesh, 5)
            npu.sleep(300)  # nor are those that the load overwrites
            add_to(again, 1)
            npu.sleep(1200, worker_stream)
            ldt.load_checkpoint(path, again, other)
            train(again, other, 2)
            pairs = list(zip(again.parameters(), pipeline.parameters(), strict=True))
            for mine, theirs in pairs:
                assert torch.equal(mine.cpu(), theirs.cpu())
                assert torch.equal(
                    other.state[mine]["exp_avg"].cpu(), optimizer.state[theirs]["exp_avg"].cpu()
                )
            return len(pairs)


@torch.no_grad()
def add_to(pipeline: ldt.Pipeline, value: float) -> None:
    for parameter in pipeline.parameters():
        parameter.add_(value)


def test_a_resumed_job_equals_one_that_never_stopped(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(resumed, tmp_path, timeout=60) == [12, 6, 6]
