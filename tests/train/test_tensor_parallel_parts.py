"""Layers that shard their own weights, as in Megatron-LM: every part counts and is saved, on whatever rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import RankPool, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 4
WIDTH = 16


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """Two layers; ``cut`` reduces them to one rank's part of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.up_bias = nn.Parameter(torch.randn(32, WIDTH) / 4), nn.Parameter(torch.randn(32))
        self.down, self.bias = nn.Parameter(torch.randn(WIDTH, 32) / 4), nn.Parameter(torch.randn(WIDTH))
        self.group: Any = None

    def cut(self, place: int, parts: int, group: Any, stride: int = 1) -> None:
        for name, dim in (("up", 0), ("up_bias", 0), ("down", 1)):
            part = nn.Parameter(getattr(self, name).detach().chunk(parts, dim)[place].clone())
            part.tensor_model_parallel, part.partition_dim = True, dim  # type: ignore[attr-defined]
            part.partition_stride = stride  # type: ignore[attr-defined]
            setattr(self, name, part)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is not None:
            y = _SumGradients.apply(y, self.group)  # type: ignore[no-untyped-call]
        y = torch.tanh(y @ self.up.t() + self.up_bias) @ self.down.t()
        if self.group is not None:
            y = _Sum.apply(y, self.group)  # type: ignore[no-untyped-call]
        return x + y + self.bias  # type: ignore[no-any-return]

    def output_spec(self, x: TensorSpec) -> TensorSpec:
        return TensorSpec(x.shape, x.dtype, requires_grad=True)


def model(seed: int, number: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block() for _ in range(number)]


def pipeline_of(mesh: ldt.Mesh, chunks: list[nn.Module], **options: Any) -> ldt.Pipeline:
    mine: list[Any] = [chunks[index] for index in mesh.topology.chunks_of(mesh.stage)]
    for chunk in mine if mesh.topology.tp[mesh.stage] > 1 else ():
        chunk.cut(
            mesh.tp_rank, mesh.topology.tp[mesh.stage], mesh.tp_mesh.get_group(), options.get("stride", 1)
        )
    options.pop("stride", None)
    return ldt.Pipeline(mine, mesh, loss_fn=toy_loss, **options)


def clipped(tp: list[int], dp: int) -> float:
    topology = Topology(tp, dp=dp, edge_dp=1)
    chunks, batch = model(0, topology.num_chunks), toy_microbatches(4)
    reference = nn.ModuleList(unsplit_step(chunks, batch, toy_loss)[1])
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        pipeline = pipeline_of(mesh, chunks)
        pipeline.step(batch if mesh.is_edge else None)
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e-2, mesh)
        torch.testing.assert_close(norm, expected)
        for index in topology.chunks_of(mesh.stage):
            whole = reference[index].up.grad.chunk(topology.tp[mesh.stage])[mesh.tp_rank]  # type: ignore[union-attr]
            torch.testing.assert_close(chunks[index].up.grad, whole)
        return norm.item()


@pytest.mark.parametrize(("tp", "dp"), [([1, 2, 1], 1), ([2, 1], 1), ([1, 1, 1], 1)])
def test_the_norm_is_of_all_parts(pool: RankPool, tp: list[int], dp: int) -> None:
    assert len(set(pool.run(clipped, tp, dp, ranks=range(sum(tp))))) == 1


def skipped() -> tuple[float, bool]:
    """An infinity in the second rank's part skips the step on all ranks."""
    topology = Topology([1, 2, 1])
    with ldt.connect(topology) as mesh:
        chunks = model(0, topology.num_chunks)
        scaler = ldt.GradScaler(mesh, init_scale=8.0)
        pipeline = pipeline_of(mesh, chunks, grad_scaler=scaler)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0)
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        if mesh.stage == 1 and mesh.tp_rank == 1:
            chunks[1].down.grad[0, 0] = torch.inf  # type: ignore[index, union-attr]
        scaler.step(optimizer)
        scaler.update()
        same = zip(before, pipeline.parameters(), strict=True)
        return scaler.get_scale(), all(torch.equal(old, new) for old, new in same)


def test_an_infinity_in_any_part_skips_the_step(pool: RankPool) -> None:
    assert pool.run(skipped) == [(4.0, True)] * 4


def whole(value: Tensor, dim: int | None, mesh: ldt.Mesh) -> Tensor:
    if dim is None or mesh.topology.tp[mesh.stage] == 1:
        return value.detach().clone()
    parts = [torch.empty_like(value) for _ in range(mesh.tp_mesh.size())]
    dist.all_gather(parts, value.detach().contiguous(), group=mesh.tp_mesh.get_group())
    return torch.cat(parts, dim)


def state(mesh: ldt.Mesh, chunks: list[nn.Module], optimizer: Any) -> dict[str, Tensor]:
    """Return all trained tensors of this rank, unsharded, by name."""
    found = {}
    dims = {"up": 0, "up_bias": 0, "down": 1}
    for index in mesh.topology.chunks_of(mesh.stage):
        for name, parameter in chunks[index].named_parameters():
            found[f"{index}.{name}"] = whole(parameter, dims.get(name), mesh)
            average = optimizer.state[parameter]["exp_avg"]
            found[f"{index}.{name}.average"] = whole(average, dims.get(name), mesh)
    return found


def saved(path: Path, tp: list[int], load: bool) -> dict[str, Tensor]:
    """Train and save, or load into different random weights."""
    topology = Topology(tp)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        chunks, batch = model(int(load), topology.num_chunks), toy_microbatches(2)
        pipeline = pipeline_of(mesh, chunks)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        if load:
            assert ldt.load_checkpoint(path, pipeline, optimizer) is not None
        else:
            pipeline.step(batch if mesh.is_edge else None)
            optimizer.step()
            ldt.save_checkpoint(path, pipeline, optimizer, step=1)
        return state(mesh, chunks, optimizer)


@pytest.mark.parametrize(
    ("first", "second"), [([1, 2, 1], [1, 2, 1]), ([1, 2, 1], [1, 1, 1]), ([1, 1, 1], [1, 2, 1])], ids=str
)
def test_all_parts_are_saved(pool: RankPool, tmp_path: Path, first: list[int], second: list[int]) -> None:
    before: dict[str, Tensor] = {}
    for found in pool.run(saved, tmp_path, first, False, ranks=range(sum(first))):
        before |= found
    for found in pool.run(saved, tmp_path, second, True, ranks=range(sum(second))):
        for name, tensor in found.items():
            assert torch.equal(tensor, before[name]), name


def refused(path: Path) -> str:
    """Parts with a stride cannot be merged."""
    with ldt.connect(Topology([1, 2]), ranks=range(3)) as mesh:
        pipeline = pipeline_of(mesh, model(0, 3), stride=2)
        with pytest.raises(ldt.LdtError) as caught:
            ldt.save_checkpoint(path, pipeline, step=1)
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


def test_strides_are_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(refused, tmp_path, ranks=range(3)):
        assert (
            "chunk.1.up is marked tensor_model_parallel with partition_dim 0 and partition_stride 2" in text
        )
    assert not list(tmp_path.iterdir())
