"""Kernels load at the first launch for a shape, which waits for all that is queued: the step ends all the same."""

from __future__ import annotations

import npu
import pytest
import torch
from torch import nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


class Loading(nn.Module):
    """A chunk whose first forward and first backward for a shape wait for everything queued on the device."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk
        self.loaded: set[tuple[str, torch.Size]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.load("forward", x)
        output: torch.Tensor = self.chunk(x)
        if output.requires_grad:
            output.register_hook(lambda grad: self.load("backward", grad))
        return output

    def load(self, what: str, tensor: torch.Tensor) -> None:
        if type(tensor) is torch.Tensor and (what, tensor.shape) not in self.loaded:
            self.loaded.add((what, tensor.shape))
            npu.start().synchronize_all()


def losses_while_kernels_load(topology: Topology, sizes: list[int], transport: str) -> None:
    of_device, options = npu.TRANSPORTS[transport]
    with npu.late(3, 300, **of_device) as device, torch.Stream(device):
        chunks = [chunk.to(device) for chunk in toy_chunks(topology, width=16)]
        with ldt.connect(topology, "hccl", ranks=range(topology.world_size), **options) as mesh:
            mine = [Loading(chunks[index]) for index in topology.chunks_of(mesh.stage)]
            pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
            for size in sizes:
                batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(6, width=16, batch=size)]
                batch[3:5] = [(x[1:], y[1:]) for x, y in batch[3:5]]
                result = pipeline.step(batch if mesh.is_edge else None)
                if mesh.is_edge:
                    expected = [toy_loss(nn.Sequential(*chunks)(x), y).item() for x, y in batch]
                    assert [loss.item() for loss in result.losses or ()] == expected


@pytest.mark.parametrize("transport", npu.TRANSPORTS)
@pytest.mark.parametrize(
    "topology", [Topology([1, 2]), Topology([1, 1, 1]), Topology([1, 1], dp=2, edge_dp=1)], ids=repr
)
def test_a_step_ends_while_kernels_load(pool: RankPool, topology: Topology, transport: str) -> None:
    pool.run(losses_while_kernels_load, topology, [4, 4, 6], transport, timeout=40)
