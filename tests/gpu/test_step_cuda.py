"""A step on GPUs does not synchronize, and its memory does not grow with the number of microbatches."""

from __future__ import annotations

import pytest
import torch
from sharing import my_device

import ldt
from ldt.runtime.comm.transports import TransportChoice
from ldt.runtime.execution.run_ahead import MAX_AHEAD
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches

WORLD_SIZE = 2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
each_transport = pytest.mark.parametrize("transport", ["copy_engine", "nccl", "c10d"])

WIDTH, ROWS = 1024, 1024
ACTIVATION = WIDTH * ROWS * 4


def make(transport: TransportChoice) -> ldt.Pipeline:
    device = my_device()
    mesh = ldt.connect(ldt.Topology([1, 1]), "nccl", device=device, transport=transport)
    chunks = toy_chunks(mesh.topology, width=WIDTH)
    mine = [chunks[index].to(device) for index in mesh.topology.chunks_of(mesh.stage)]
    return ldt.Pipeline(mine, mesh, loss_fn=toy_loss)


def batch(pipeline: ldt.Pipeline, number: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    if not pipeline.mesh.is_edge:
        return None
    made = toy_microbatches(number, width=WIDTH, batch=ROWS)
    return [(x.to(pipeline.mesh.device), y.to(pipeline.mesh.device)) for x, y in made]


def _no_sync(transport: TransportChoice) -> None:
    pipeline = make(transport)
    for mode in ("default", "error"):  # the first step may synchronize
        microbatches = batch(pipeline, 8)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            pipeline.step(microbatches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    pipeline.mesh.close()


@each_transport
def test_a_step_does_not_synchronize(pool: RankPool, transport: TransportChoice) -> None:
    pool.run(_no_sync, transport, timeout=40)


def _peak(transport: TransportChoice) -> list[int]:
    """Return the peak bytes in steps of 4 and of 64 microbatches, with receive buffers and without the batch."""
    pipeline = make(transport)
    lanes, peaks = pipeline.mesh.all_lanes(), []
    for number in (4, 4, 64):
        microbatches = batch(pipeline, number)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        pipeline.step(microbatches)
        torch.cuda.synchronize()
        # The copy engine's memory is not of torch's allocator, and that of the others is.
        pooled = sum(int(lane.stats()["pool_bytes"]) for lane in lanes) if transport == "copy_engine" else 0
        given = 0 if microbatches is None else 2 * number * ACTIVATION
        peaks.append(torch.cuda.max_memory_allocated() + pooled - given)
    pipeline.mesh.close()
    return peaks[1:]


@each_transport
def test_memory_does_not_grow_with_the_microbatches(pool: RankPool, transport: TransportChoice) -> None:
    """Sends that are not known to be complete may remain, as the host is a few actions ahead."""
    for few, many in pool.run(_peak, transport, timeout=40):
        assert many - few <= MAX_AHEAD * ACTIVATION
