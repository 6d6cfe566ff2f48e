"""Messages with more tensors than a stream queue holds operations: every transport sends them in few transfers."""

from __future__ import annotations

import copy

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 2
WIDTH = 64


class Fan(nn.Module):
    """Takes any number of tensors of ``WIDTH`` elements and returns ``count`` of them, each with a gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(count, WIDTH) + 0.5)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        total = torch.stack(inputs).sum(0)
        outputs = tuple((self.scales * total).unbind())
        return outputs if len(outputs) > 1 else outputs[0]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _step(transport: str, counts: list[int], microbatches: int) -> None:
    npu.start()  # before autograd, which counts devices
    torch.manual_seed(0)
    chunks = [Fan(count) for count in counts]
    batch = [(torch.rand(WIDTH), torch.rand(WIDTH)) for _ in range(microbatches)]
    model = copy.deepcopy(chunks)
    for x, target in batch:
        hidden: tuple[Tensor, ...] = (x,)
        for chunk in model:
            outputs = chunk(*hidden)
            hidden = outputs if isinstance(outputs, tuple) else (outputs,)
        (square(hidden[0], target) / microbatches).backward()
    of_device, options = npu.TRANSPORTS[transport]
    with npu.late(1, 0, **of_device) as device, torch.Stream(device):
        mine = [chunk.to(device) for chunk in chunks]
        with ldt.connect(Topology([1, 1]), "hccl", **options) as mesh:
            mine = [mine[index] for index in mesh.topology.chunks_of(mesh.stage)]
            expected = [model[index] for index in mesh.topology.chunks_of(mesh.stage)]
            pipeline = ldt.Pipeline(mine, mesh, loss_fn=square if mesh.is_edge else None)
            given = [(x.to(device), y.to(device)) for x, y in batch] if mesh.is_edge else None
            pipeline.step(given)
            for got, wanted in zip(mine, expected, strict=True):
                torch.testing.assert_close(got.scales.grad.cpu(), wanted.scales.grad)
        dist.barrier()


@pytest.mark.parametrize("transport", npu.TRANSPORTS)
def test_hundreds_of_tensors_on_every_hop(pool: RankPool, transport: str) -> None:
    pool.run(_step, transport, [300, 300, 1], 4, timeout=60)


def test_many_microbatches(pool: RankPool) -> None:
    pool.run(_step, "copy engine", [1, 2, 1], 64, timeout=60)


def _messages(transport: str) -> float:
    """Small, large, contiguous and strided tensors into memory of the lane and other memory, sent far ahead."""
    of_device, options = npu.TRANSPORTS[transport]
    with npu.late(2, 0, **of_device) as device, torch.Stream(device):
        sizes = [(7, 3), (0, 4), (1 << 15,), (5,), (2, 1 << 14), *[(1 << 13, 3)] * 30, ()]
        with ldt.connect(Topology([1, 1]), "hccl", **options) as mesh:
            end, checks = forward_end(mesh), []
            assert end is not None
            for number in range(20):
                message = [torch.full(size, number + i, device=device) for i, size in enumerate(sizes)]
                if number % 2:
                    message[0] = message[0].t()
                if end.sends:
                    end.send(message, f"message {number}")
                    continue
                shapes, dtypes = [tensor.shape for tensor in message], [tensor.dtype for tensor in message]
                targets = end.lane.buffers(shapes, dtypes)
                if number % 3 == 0:
                    targets[3] = torch.zeros(10, dtype=torch.int64, device=device)[::2]
                end.lane.recv(targets, 0).wait()
                checks += [(got == wanted).all() for got, wanted in zip(targets, message, strict=True)]
                del targets
            if checks:
                assert_all(checks)
            torch.accelerator.synchronize()
            return end.lane.stats()["pool_bytes"]


@pytest.mark.parametrize("transport", npu.TRANSPORTS)
def test_packed_tensors_arrive_in_order(pool: RankPool, transport: str) -> None:
    _, pooled = pool.run(_messages, transport, timeout=60)
    assert pooled < 4 * 31 * (1 << 18)  # of a few messages
