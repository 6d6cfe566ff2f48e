"""The first step of processes that have done nothing on their GPUs before. Skipped without two GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ldt
from ldt.runtime.carriers import TransportChoice
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WIDTH = 1024


def first_step(transport: TransportChoice) -> list[float]:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    with ldt.connect(ldt.Topology([1, 1]), "nccl", device=device, transport=transport) as mesh:
        chunks = toy_chunks(mesh.topology, width=WIDTH)
        mine = [chunks[index].to(device) for index in mesh.topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        batch = toy_microbatches(8, width=WIDTH, batch=WIDTH)
        given = [(x.to(device), y.to(device)) for x, y in batch]
        result = pipeline.step(given if mesh.is_edge else None)
        return [loss.item() for loss in result.losses or ()]


@pytest.mark.parametrize("transport", ["nccl", "c10d", "copy_engine"])
def test_it_ends(transport: TransportChoice) -> None:
    """cuBLAS, when it is first used, waits for all receives that were posted ahead: ``connect`` uses it before.

    So does a kernel that is loaded at its first launch: ``import ldt`` has all loaded at once.
    """
    with RankPool(2) as pool:
        losses, nothing = pool.run(first_step, transport, timeout=60)
    assert len(losses) == 8
    assert nothing == []
