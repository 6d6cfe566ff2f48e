"""What is sent by streams that are late is not changed by what runs later on the current one."""

from __future__ import annotations

import npu
import pytest
import torch
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool
from ldt.testing.late_sends import each_kind_at_once, hold_sends
from ldt.topology import Topology

WORLD_SIZE = 2
ROWS, WIDTH = 300, 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Position(nn.Module):
    """Keeps its output, which the next forward clears; its gradient has the memory of the one that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            with torch.no_grad():
                self.kept.zero_()
        self.kept = x + self.pos.unsqueeze(0)
        return self.kept


def dot(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def step(transport: str, split: bool, held: bool) -> None:
    topology = Topology([1, 1])
    with npu.late(3, 500) as device, torch.Stream(device):
        chunks = [chunk.to(device) for chunk in (Scale(), Position(), nn.Identity())]
        batch = [
            (torch.ones(1, ROWS, WIDTH).to(device), torch.full((1, ROWS, WIDTH), 10.0**m).to(device))
            for m in range(4)
        ]
        with ldt.connect(topology, "hccl", transport=transport) as mesh:
            mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
            plan = each_kind_at_once(topology, 4, split)
            pipeline = ldt.Pipeline(mine, mesh, plan, dot if mesh.is_edge else None)
            if held:
                hold_sends(mesh)
            result = pipeline.step(batch if mesh.is_edge else None)
            if mesh.is_edge:
                assert result.losses is not None
                assert [loss.item() for loss in result.losses] == [10.0**m * ROWS * WIDTH for m in range(4)]
                assert chunks[0].w.grad.tolist() == [1111 / 4 * ROWS] * WIDTH
            else:
                assert chunks[1].pos.grad.cpu().unique().tolist() == [1111 / 4]


@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize(("split", "held"), [(False, True), (True, True), (False, False)])
def test_what_is_sent_late_is_what_was_computed(
    pool: RankPool, transport: str, split: bool, held: bool
) -> None:
    pool.run(step, transport, split, held, timeout=60)
