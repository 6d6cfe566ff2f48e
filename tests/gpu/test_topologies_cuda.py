"""Stages of several GPUs and replicas equal the unsplit model, over NCCL and by the copy engine.

Each needs three or four GPUs. On two, ranks share them: see sharing.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharing import my_device
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import ldt
from ldt.runtime.comm.transfer_modes import Transfer
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 4
TRANSPORTS: list[TransportChoice] = ["copy_engine", "host", "nccl"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [
    ([1, 2], 1, 1),
    ([2, 1], 1, 1),
    ([1, 1, 1], 1, 1),
    ([2, 2], 1, 1),
    ([1, 3], 1, 1),
    ([1, 1, 2], 1, 1),
    ([2, 1, 1], 1, 1),
    ([1, 1], 2, 2),
    ([1, 1], 2, 1),
]


def steps(
    tp: list[int],
    dp: int,
    edge_dp: int,
    laps: int,
    policy: LanePolicy,
    transfer: Transfer,
    dtype: torch.dtype,
    transport: TransportChoice,
) -> None:
    topology = Topology(tp, dp=dp, edge_dp=edge_dp, laps=laps)
    device = my_device()
    chunks = [chunk.to(device, dtype) for chunk in toy_chunks(topology, width=256)]
    batches = [
        [(x.to(device, dtype), y.to(device, dtype)) for x, y in toy_microbatches(6, width=256, seed=seed)]
        for seed in range(edge_dp)
    ]
    references = [unsplit_step(chunks, copy.deepcopy(batch), toy_loss) for batch in batches]
    ranks = range(topology.world_size)
    options: dict[str, Any] = {"transfer": transfer, "transport": transport, "device": device, "ranks": ranks}
    with ldt.connect(topology, "nccl", policy, **options) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
            if mesh.is_edge:
                assert result.losses is not None
                assert all(map(torch.equal, result.losses, references[mesh.replica][0]))
            for index in topology.chunks_of(mesh.stage):
                check_gradients(
                    chunks[index], [reference[index] for _, reference in references], dp > edge_dp
                )


def check_gradients(chunk: nn.Module, references: list[nn.Module], shared: bool) -> None:
    """Replicas that share an edge add shares of its microbatches, in another order."""
    for parameter, *others in zip(chunk.parameters(), *(r.parameters() for r in references), strict=True):
        grads = [other.grad for other in others]
        expected = sum(grads[1:], grads[0]) / len(grads)  # type: ignore[arg-type, operator]
        assert parameter.grad is not None
        assert expected.abs().sum() > 0
        if shared:  # up to the rounding of the sums, which may cancel
            precision = 4 * torch.finfo(expected.dtype).eps
            bound = precision * float(expected.abs().max())
            torch.testing.assert_close(parameter.grad, expected, rtol=precision, atol=bound)
        else:
            assert torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "dp", "edge_dp"), SHAPES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_equal_the_unsplit_model(
    pool: RankPool, tp: list[int], dp: int, edge_dp: int, dtype: torch.dtype, transport: TransportChoice
) -> None:
    ranks = range(Topology(tp, dp=dp, edge_dp=edge_dp).world_size)
    for laps, policy, transfer in (
        (1, "dedicated", "leader"),
        (2, "paired", "scatter"),
        (1, "dedicated", "direct"),
    ):
        pool.run(steps, tp, dp, edge_dp, laps, policy, transfer, dtype, transport, ranks=ranks, timeout=120)


class Rows(nn.Module):
    """Computes on its own rows; the head splits them over the ranks of its stage, the tail gathers them."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(256, 256), part
        self.mesh: ldt.Mesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x.to_local() if isinstance(x, DTensor) else x
        y = torch.tanh(self.linear(part))
        if self.mesh is None:
            return y
        if self.part == "head":
            whole = DTensor.from_local(y, self.mesh.tp_mesh, [Replicate()])
            return whole.redistribute(placements=[Shard(0)])
        assert isinstance(x, DTensor)
        split = DTensor.from_local(y, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        return split.full_tensor() if self.part == "tail" else split


def split_rows(tp: list[int], transfer: Transfer, transport: TransportChoice) -> None:
    topology = Topology(tp)
    device = my_device()
    torch.manual_seed(0)
    names = ["head", *["body"] * (topology.num_chunks - 2), "tail"]
    chunks = [Rows(name).to(device) for name in names]
    batch = [
        (x.to(device), y.to(device)) for n in (8, 7, 1) for x, y in toy_microbatches(1, width=256, batch=n)
    ]
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    ranks = range(topology.world_size)
    options: dict[str, Any] = {"transfer": transfer, "transport": transport, "device": device, "ranks": ranks}
    with ldt.connect(topology, "nccl", **options) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        for chunk in mine:
            chunk.mesh = mesh
        result = ldt.Pipeline(mine, mesh, loss_fn=toy_loss).step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.losses, losses)
        for index, chunk in zip(topology.chunks_of(mesh.stage), mine, strict=True):
            for parameter, theirs in zip(chunk.parameters(), reference[index].parameters(), strict=True):
                assert parameter.grad is not None
                if index > 0:  # of this rank's rows
                    dist.all_reduce(parameter.grad, group=mesh.tp_mesh.get_group())
                torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("transfer", ["direct", "auto"])
@pytest.mark.parametrize("tp", [[1, 2], [1, 3], [2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_split_rows_between_stages_of_any_sizes(
    pool: RankPool, tp: list[int], transfer: Transfer, transport: TransportChoice
) -> None:
    pool.run(split_rows, tp, transfer, transport, ranks=range(sum(tp)), timeout=120)
