"""Sequence-parallel transformer blocks of torch itself, split between stages of any sizes, equal the unsplit model.

Each stage splits its layers and the sequence over its ranks; tensors cross a hop as ``Shard(1)``.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import ldt
from ldt.plan import Costs, Kind, optimize
from ldt.runtime.comm.transfer_modes import TransferChoice
from ldt.testing import RankPool, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 7
WIDTH, HEADS, VOCABULARY = 16, 4, 11
# Sums over ranks, replicas and microbatches have another order than in the unsplit model. The difference is about 1e-15
# in float64; in float32 up to 7e-7 was seen, too close to a limit of 1e-6 to hold on every machine.
TOLERANCE = 1e-12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feedforward = nn.LayerNorm(WIDTH), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.feedforward(self.norm2(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.block(self.embedding(tokens)))


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.norm(x)))


def parallelized(chunk: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelize in place. Between layers each rank has a part of the sequence; attention and MLP gather it."""
    sequence, gathered = (
        Shard(1),
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    )
    rowwise = RowwiseParallel(output_layouts=sequence, use_local_output=False)
    block: dict[str, Any] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    block |= {
        "attention": gathered,
        "attention.out": rowwise,
        "feedforward": gathered,
        "feedforward.down": rowwise,
    }
    block |= {
        name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "feedforward.up")
    }
    plan = block
    if isinstance(chunk, Head):
        embedding = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=sequence, use_local_output=False
        )
        plan = {"embedding": embedding} | {f"block.{name}": style for name, style in block.items()}
    elif isinstance(chunk, Tail):
        out = ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
        plan = {"norm": SequenceParallel(), "out": out}
    return parallelize_module(chunk, mesh, plan)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def batch_of(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randint(VOCABULARY, (2, 2, length), generator=generator) for length in lengths]
    return [(pair[0], pair[1]) for pair in pairs]


Options = dict[str, Any]  # timeout of ``steps``


def run(tp: list[int], lengths: list[int], options: Options) -> float:
    return steps(tp, lengths, **options)


def steps(
    tp: list[int],
    lengths: list[int],
    laps: int = 1,
    policy: LanePolicy = "dedicated",
    transfer: TransferChoice = "direct",
    dp: int = 1,
    reduction: str = "mean",
    split_backward: bool = False,
) -> float:
    """Run two steps, the second adding to the gradients of the first. Returns their norm."""
    topology = Topology(tp, dp=dp, edge_dp=1, laps=laps)
    torch.manual_seed(0)
    chunks = [chunk.double() for chunk in (Head(), *(Block() for _ in range(topology.tail - 1)), Tail())]
    batch = batch_of(lengths)
    share = len(lengths) / sum(lengths)  # with "token" each microbatch is weighted by its length

    def unsplit_loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target) * (share * target.shape[1] if reduction == "token" else 1.0)

    weighted, reference = unsplit_step(chunks, batch, unsplit_loss)
    plan = None
    if split_backward:
        costs = Costs(1.0, 2.0, latency=1.0)
        plan = optimize(topology, len(lengths), costs, split_backward=True, lanes=policy)
        assert any(action.kind is Kind.I for row in plan.rows.values() for action in row)
    with ldt.connect(topology, lanes=policy, transfer=transfer, ranks=range(topology.world_size)) as mesh:
        mine = [parallelized(copy.deepcopy(chunks[c]), mesh.tp_mesh) for c in topology.chunks_of(mesh.stage)]
        loss_fn = token_loss if reduction == "token" else mean_loss
        pipeline = ldt.Pipeline(mine, mesh, plan, loss_fn=loss_fn, loss_reduction=cast(Any, reduction))
        for times in (1, 2):
            result = pipeline.step(batch if mesh.is_edge else None)
            if mesh.is_edge:
                assert result.loss is not None
                assert result.loss.item() == pytest.approx(torch.stack(weighted).mean().item(), rel=TOLERANCE)
            for chunk, module in zip(topology.chunks_of(mesh.stage), mine, strict=True):
                check_gradients(module, reference[chunk], times, f"chunk {chunk}")
        norm = ldt.clip_grad_norm_(pipeline.parameters(), 1e6, mesh).item()
    squares = [p.grad.square().sum() for chunk in reference for p in chunk.parameters() if p.grad is not None]
    assert norm == pytest.approx(2 * float(sum(squares)) ** 0.5, rel=1e-6), "it comes in float32"
    return norm


def check_gradients(module: nn.Module, reference: nn.Module, times: int, where: str) -> None:
    """Compare relative to the chunk's largest element: some gradients, as of key biases, are zero up to rounding."""
    expected = [times * p.grad for p in reference.parameters() if p.grad is not None]
    largest = float(torch.cat([grad.flatten() for grad in expected]).abs().max())
    for (name, parameter), theirs in zip(module.named_parameters(), expected, strict=True):
        assert isinstance(parameter.grad, DTensor), f"{where}, {name}"
        error = float((parameter.grad.full_tensor() - theirs).abs().max())
        assert error <= TOLERANCE * largest, f"{where}, {name}: {error / largest}"


SETS: dict[str, tuple[list[int], list[int], Options]] = {
    "more and more ranks": ([1, 2, 4], [8, 7, 5], {}),
    "and back to one": ([2, 4, 1], [7, 5, 9], {"transfer": "auto"}),
    "more ranks than tokens": ([1, 4], [7, 3, 1], {"reduction": "token"}),
    "two laps": ([2, 4], [7, 4], {"laps": 2, "policy": "paired"}),
    "a shared edge": ([1, 2], [8, 7, 5], {"dp": 2}),
    "split backward": ([2, 4], [7, 5, 6], {"policy": "paired", "reduction": "token", "split_backward": True}),
}


BIG = ("more and more ranks", "and back to one", "two laps")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in BIG else []) for name in SETS]
)
def test_as_the_unsplit_model(pool: RankPool, name: str) -> None:
    tp, lengths, options = SETS[name]
    size = Topology(tp, dp=options.get("dp", 1), edge_dp=1).world_size
    assert len(set(pool.run(run, tp, lengths, options, ranks=range(size)))) == 1, "one norm on all ranks"
