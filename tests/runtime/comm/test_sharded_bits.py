"""Sharded tensors and their gradients arrive bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_tensors import gathered, like, part_of, split
from torch import Tensor, nn

import ldt
from ldt.runtime.comm.shards import span_of
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 9
Dims = tuple[int, int, int]  # the sharded dimension of each tensor of ``payload``


class TwoHop(nn.Module):
    """Returns its inputs unchanged, and records them and the gradients that come back."""

    def __init__(self, mesh: ldt.Mesh, dims: Dims) -> None:
        super().__init__()
        self.mesh, self.dims = mesh, dims
        self.came: list[Tensor] = []
        self.grads: dict[int, Tensor] = {}

    def forward(self, *tensors: Tensor) -> Any:
        for index, tensor in enumerate(tensors):
            self.keep(index, tensor)
        return tuple(like(part_of(tensor) * 1, tensor) for tensor in tensors)

    def keep(self, index: int, tensor: Tensor) -> None:
        if type(part_of(tensor)) is Tensor:  # not while shapes are inferred
            self.came.append(part_of(tensor).detach().clone())
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.grads.update({index: part_of(grad).clone()}))  # type: ignore[no-untyped-call]


class TwoHopHead(TwoHop):
    """Creates the tensors; floating-point tensors require a gradient."""

    def __init__(self, mesh: ldt.Mesh, dims: Dims) -> None:
        super().__init__(mesh, dims)
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        made = [
            whole * self.one.to(whole.dtype) if whole.is_floating_point() else whole for whole in payload(1)
        ]
        tensors = [split(whole, self.mesh, dim) for whole, dim in zip(made, self.dims, strict=True)]
        for index, tensor in enumerate(tensors):
            self.keep(index, tensor)
        return tuple(tensors)


class TwoHopTail(TwoHop):
    def forward(self, *tensors: Tensor) -> Any:
        return tuple(map(gathered, super().forward(*tensors)))


def payload(seed: int) -> list[Tensor]:
    """Return random bits, without infinities and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (7, 11, 5)
    x, z = (torch.randn(shape, dtype=dtype, generator=generator) for dtype in (torch.float32, torch.float64))
    return [x, z, torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)]


def weighted_sum(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Use the payload of another seed as the gradient of each output."""
    x, z, ids = output
    weights = payload(2)
    return (z * weights[1]).sum() + (x * weights[0]).sum().double() + ids.sum() * 0


def exact(tp: list[int], dims: Dims) -> list[int]:
    topology = Topology(tp)
    kinds = {0: TwoHopHead, topology.tail: TwoHopTail}
    with ldt.connect(topology, transfer="direct", ranks=range(topology.world_size)) as mesh:
        mine = [kinds.get(chunk, TwoHop)(mesh, dims) for chunk in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=weighted_sum)
        pipeline.step([(torch.ones(1), torch.ones(1))] if mesh.is_edge else None)
    found = []
    for module in mine:
        for index, (came, whole, dim) in enumerate(zip(module.came, payload(1), dims, strict=True)):
            mine_of_it = slice(*span_of(whole.shape[dim], mesh.tp_rank, topology.tp[mesh.stage]))
            assert torch.equal(came, whole.movedim(dim, 0)[mine_of_it].movedim(0, dim)), f"tensor {index}"
            if index < 2:
                grad = payload(2)[index].movedim(dim, 0)[mine_of_it].movedim(0, dim)
                assert torch.equal(module.grads[index], grad), f"gradient {index}"
        found.append(len(module.came) + len(module.grads))
    return found


@pytest.mark.parametrize("dims", [(0, 1, 2), (-1, -2, 0)], ids=str)
def test_bits_arrive_as_they_were(pool: RankPool, dims: Dims) -> None:
    """Seven, eleven and five rows on two, three and four ranks give parts of all sizes, and an empty one."""
    assert pool.run(exact, [2, 3, 4], dims) == [[5, 5]] * 2 + [[5]] * 7
