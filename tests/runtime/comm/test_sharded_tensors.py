"""One hop with several tensors, sharded in different dimensions and of different dtypes, and a plain one."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from split_tensors import gathered, like, part_of, split
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import ldt
from ldt.plan import Costs
from ldt.runtime.comm.transfer_modes import TransferChoice
from ldt.runtime.mesh import autotune
from ldt.runtime.mesh.autotune import crossover
from ldt.testing import RankPool, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 9
WIDTH = 6
DTYPES = (torch.float32, torch.float64, torch.int64)
Dims = tuple[
    int, int, int
]  # split tensors: float32 and float64 [batch, tokens, width], and int64 [batch, tokens]
Options = dict[str, Any]  # timeout of ``steps``


class Mixed(nn.Module):
    """Computes elementwise, so that each rank can have any part."""

    def __init__(self, plain: int) -> None:
        super().__init__()
        self.pace, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))
        self.plain = plain
        self.mesh: ldt.Mesh | None = None
        self.dims: Dims = (0, 1, 0)

    def forward(self, x: Tensor, z: Tensor, ids: Tensor, plain: Tensor) -> Any:
        if self.mesh is not None:
            for tensor, dtype, dim in zip((x, z, ids), DTYPES, self.dims, strict=True):
                assert tensor.dtype == dtype
                assert cast(DTensor, tensor).placements == (Shard(dim % tensor.dim()),)
        y = like(torch.tanh(part_of(x) * self.pace + self.bias), x)
        return (
            y,
            like(torch.sin(part_of(z) * self.pace.double()), z),
            like(part_of(ids) + 1, ids),
            plain * 1.0,
        )


class MixedHead(Mixed):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        made: list[Tensor] = [
            torch.tanh(x * self.pace + self.bias),
            x.double() * self.pace.double(),
            (x[..., 0] * 10).long(),
        ]
        if self.mesh is not None:
            mesh = self.mesh
            made = [split(tensor, mesh, dim) for tensor, dim in zip(made, self.dims, strict=True)]
        return (*made, self.pace * torch.full((self.plain,), 1 / self.plain))


class MixedTail(Mixed):
    def forward(self, x: Tensor, z: Tensor, ids: Tensor, plain: Tensor) -> Any:
        y, z, ids, plain = super().forward(x, z, ids, plain)
        return gathered(y) * plain.sum() + gathered(z).float() + gathered(ids)[..., None].float() / 100


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 100


def mixed_chunks(topology: Topology, plain: int, frozen: tuple[int, ...] = ()) -> list[Mixed]:
    torch.manual_seed(0)
    chunks = [MixedHead(plain), *(Mixed(plain) for _ in range(topology.tail - 1)), MixedTail(plain)]
    for index in frozen:
        chunks[index].requires_grad_(False)
    return chunks


def batch_of(sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, *size, WIDTH, generator=generator) for size in sizes]
    return [(pair[0], pair[1]) for pair in pairs]


SIZES = [(4, 6), (3, 5), (1, 1), (2, 7)]  # batch and tokens: even and uneven parts, and fewer than ranks


def steps(
    tp: list[int],
    dims: Dims,
    sizes: list[tuple[int, int]] = SIZES,
    laps: int = 1,
    policy: LanePolicy = "dedicated",
    transfer: TransferChoice = "direct",
    frozen: tuple[int, ...] = (),
    eval_first: bool = False,
    plain: int = 3,
) -> dict[str, float]:
    """Compare two steps with the unsplit model. Returns the bytes sent in the last one, by lane."""
    topology = Topology(tp, laps=laps)
    chunks, batch = mixed_chunks(topology, plain, frozen), batch_of(sizes)
    losses, reference = unsplit_step(chunks, batch, sum_loss)
    with ldt.connect(topology, lanes=policy, transfer=transfer, ranks=range(topology.world_size)) as mesh:
        mine = copy.deepcopy([chunks[c] for c in topology.chunks_of(mesh.stage)])
        for module in mine:
            module.mesh, module.dims = mesh, dims
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=sum_loss)
        given = batch if mesh.is_edge else None
        if eval_first:
            assert pipeline.eval(given).losses is None or mesh.is_edge
        for times in (1, 2):
            result = pipeline.step(given)
            if mesh.is_edge:
                torch.testing.assert_close(result.losses, losses, rtol=1e-6, atol=1e-6)
            for chunk, module in zip(topology.chunks_of(mesh.stage), mine, strict=True):
                check_gradients(mesh, module, reference[chunk], times)
        if eval_first and mesh.is_edge:
            torch.testing.assert_close(pipeline.eval(given).losses, losses, rtol=1e-6, atol=1e-6)
        elif eval_first:
            pipeline.eval()
        return {name: lane["sent_bytes"] for name, lane in result.stats.lanes.items() if lane["sent_bytes"]}


def check_gradients(mesh: ldt.Mesh, module: Mixed, reference: nn.Module, times: int) -> None:
    """On all chunks but the head, each rank has the gradients of its parts, None if empty; they sum to the whole."""
    for (name, parameter), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert parameter.grad is None, name
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if not isinstance(module, MixedHead):
            dist.all_reduce(grad, group=mesh.tp_mesh.get_group())
        torch.testing.assert_close(grad, times * theirs.grad, rtol=1e-5, atol=1e-6)


def run(tp: list[int], dims: Dims, options: Options) -> dict[str, float]:
    return steps(tp, dims, **options)


@pytest.mark.parametrize(
    ("tp", "dims", "options"),
    [
        ([2, 3, 4], (0, 2, 1), {}),
        ([2, 3, 4], (-1, -2, -1), {"policy": "paired", "transfer": "auto"}),
        ([1, 3, 2], (1, 0, 0), {"laps": 2, "policy": "paired"}),
        ([2, 3], (1, 2, 1), {"sizes": [(0, 3), (2, 0), (3, 3)]}),  # no rows, and no tokens
        ([3, 1], (2, 0, -1), {"sizes": [(3, 3), (0, 3), (1, 1)]}),
        ([2, 3], (0, 1, 1), {"frozen": (0,), "transfer": "auto"}),
        ([1, 2, 2], (-2, -1, 0), {"frozen": (1,)}),
        ([2, 3], (0, 1, 0), {"frozen": (0, 1)}),
        ([2, 3], (1, -1, 0), {"eval_first": True}),
    ],
    ids=str,
)
def test_as_the_unsplit_model(pool: RankPool, tp: list[int], dims: Dims, options: Options) -> None:
    pool.run(run, tp, dims, options, ranks=range(sum(tp)))


PLAIN = 3001  # odd, and more elements than the others' parts have


def cut_from_the_first_byte(tp: list[int]) -> dict[str, float]:
    """Test links on which "auto" splits messages of any size."""
    autotune.crossover = lambda leader, scatter: 0.0
    try:
        return steps(tp, (0, 2, 1), transfer="auto", plain=PLAIN)
    finally:
        autotune.crossover = crossover


@pytest.mark.parametrize("tp", [[2, 3], [4, 3, 2]], ids=str)
def test_plain_tensors_are_cut_while_sharded_ones_go_direct(pool: RankPool, tp: list[int]) -> None:
    by_rank = pool.run(cut_from_the_first_byte, tp, ranks=range(sum(tp)))
    shared = [sum(n for name, n in lanes.items() if "direct" not in name) for lanes in by_rank]
    direct = [sum(n for name, n in lanes.items() if "direct" in name) for lanes in by_rank]
    elements = sum(batch * tokens for batch, tokens in SIZES)
    split_bytes = elements * (2 * WIDTH * (4 + 8) + 8)  # in both directions, except for the integers
    assert sum(direct) == len(tp) * split_bytes
    assert sum(shared) == len(tp) * 2 * len(SIZES) * PLAIN * 4
    assert all(shared[:2]), "of which the second rank sends a share, too"


def measured(tp: list[int]) -> Costs:
    topology = Topology(tp)
    chunks = mixed_chunks(topology, 3)
    with ldt.connect(topology, transfer="direct", ranks=range(topology.world_size)) as mesh:
        mine = [chunks[c] for c in topology.chunks_of(mesh.stage)]
        for module in mine:
            module.mesh = mesh
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=sum_loss)
        return pipeline.measure_costs(batch_of([(4, 6)]) if mesh.is_edge else None, steps=1)


@pytest.mark.parametrize("tp", [[1, 2], [2, 3]], ids=str)
def test_costs_are_of_whole_tensors(pool: RankPool, tp: list[int]) -> None:
    """A link carries all parts, whichever ranks send them."""
    elements = 4 * 6 * WIDTH
    for costs in pool.run(measured, tp, ranks=range(sum(tp))):
        assert costs.bytes["forward"] == (elements * 4 + elements * 8 + 4 * 6 * 8 + 3 * 4,) * 2
