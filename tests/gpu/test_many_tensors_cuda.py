"""Messages of hundreds of tensors over every transport, on one GPU or two."""

from __future__ import annotations

import copy

import pytest
import torch
from sharing import my_device
from torch import Tensor, nn

import ldt
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool

WORLD_SIZE = 2
WIDTH = 64

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Fan(nn.Module):
    """Takes any number of tensors and returns ``count`` tensors, each with a gradient."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(count, width) + 0.5)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        total = torch.stack(inputs).mean(0)
        outputs = tuple((self.scales * total).unbind())
        return outputs if len(outputs) > 1 else outputs[0]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _steps(transport: TransportChoice, counts: list[int], width: int, microbatches: int) -> None:
    device = my_device()
    torch.manual_seed(0)
    chunks = [Fan(count, width).to(device) for count in counts]
    batch = [
        (torch.rand(width, device=device), torch.rand(width, device=device)) for _ in range(microbatches)
    ]
    model = copy.deepcopy(chunks)
    for x, target in batch:
        hidden: tuple[Tensor, ...] = (x,)
        for chunk in model:
            outputs = chunk(*hidden)
            hidden = outputs if isinstance(outputs, tuple) else (outputs,)
        (square(hidden[0], target) / microbatches).backward()
    with ldt.connect(ldt.Topology([1, 1]), "nccl", transport=transport, device=device) as mesh:
        assert {mesh.transport_of(channel) for channel in mesh.endpoints} == {transport}
        indices = mesh.topology.chunks_of(mesh.stage)
        pipeline = ldt.Pipeline([chunks[index] for index in indices], mesh, loss_fn=square)
        for _ in range(3):
            for index in indices:
                chunks[index].zero_grad()
            pipeline.step(batch if mesh.is_edge else None)
        for index in indices:
            torch.testing.assert_close(chunks[index].scales.grad, model[index].scales.grad)


@pytest.mark.parametrize("transport", ["copy_engine", "host", "nccl", "c10d"])
@pytest.mark.parametrize(
    ("counts", "width", "microbatches"),
    [([300, 300, 1], WIDTH, 4), ([1, 1, 1], WIDTH, 64), ([60, 60, 1], 1 << 16, 8)],
    ids=["300 small tensors", "64 microbatches", "60 large tensors"],
)
def test_any_number_of_tensors(
    pool: RankPool, transport: TransportChoice, counts: list[int], width: int, microbatches: int
) -> None:
    pool.run(_steps, transport, counts, width, microbatches, timeout=60)
