"""Tests that a rank with different modules, or a late one, raises an error with its name on every rank in time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from split_tensors import step_error
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

import ldt
from ldt.runtime import TensorSpec
from ldt.runtime.mesh import autotune
from ldt.testing import RankPool, ToyChunk, in_time, paced
from ldt.topology import Topology

WORLD_SIZE = 6
WIDTH = 16


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ToyChunk(WIDTH), ToyChunk(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


def sharded_unlike(names: list[list[str]]) -> str:
    """Cloud replicas call fully_shard on submodules of these names."""

    def make(mesh: ldt.Mesh, chunk: int) -> nn.Module:
        module = Two()
        for name in [] if mesh.is_edge else names[mesh.replica]:
            fully_shard(module.get_submodule(name), mesh=mesh.dp_mesh)
        return module

    return step_error(Topology([1, 1], dp=2, edge_dp=1), make)


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        ([["first"], []], "{'1': ['first']}", "none"),
        ([[], ["first"]], "none", "{'1': ['first']}"),
        ([["first", "second"], ["first"]], "{'1': ['first', 'second']}", "{'1': ['first']}"),
    ],
)
def test_ranks_of_a_stage_shard_alike(
    pool: RankPool, names: list[list[str]], first: str, second: str
) -> None:
    for text in pool.run(sharded_unlike, names, ranks=range(3)):
        assert "all ranks of a stage must call fully_shard on the same modules of a chunk" in text
        assert f"rank 1 called it on {first}, rank 2 on {second}" in text


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(WIDTH, WIDTH), width - WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.linear(x), (0, self.more))


def one_is_wider(dp: int) -> str:
    """The last rank of the last replica has a different module."""

    def make(mesh: ldt.Mesh, chunk: int) -> nn.Module:
        return Wide(WIDTH + 2 if mesh.rank == mesh.topology.world_size - 1 else WIDTH)

    return step_error(Topology([1, 2], dp=dp, edge_dp=1), make)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_different_module_on_any_replica_raises_on_all_ranks(pool: RankPool, dp: int) -> None:
    last = 2 * dp
    for text in pool.run(one_is_wider, dp, ranks=range(last + 1)):
        assert "the ranks of stage 1 disagree on what chunk 1 returns" in text
        assert "its leader says float32[7, 16] with grad" in text
        assert f"rank {last} says float32[7, 18] with grad" in text


LATE = 3  # the rank that is late
LIMIT, LATE_SECONDS = paced(6.0).total_seconds(), paced(24.0).total_seconds()  # making groups counts


def late_in_autotune(key: str) -> tuple[float, str]:
    """One rank stops in the middle of autotuning until all others gave up."""
    store, original = c10d._get_default_store(), autotune._seconds
    dist.barrier()  # a rank that begins later would learn of the failure before its own timeout
    start = time.monotonic()

    def late(*arguments: Any) -> float:
        while time.monotonic() < start + LATE_SECONDS and store.add(key, 0) < WORLD_SIZE - 1:
            time.sleep(0.05)
        return original(*arguments)

    if dist.get_rank() == LATE:
        autotune._seconds = late  # type: ignore[assignment]
    try:
        with pytest.raises(ldt.LdtError) as caught:
            ldt.connect(Topology([2, 2, 2]), transfer="auto", timeout=timedelta(seconds=LIMIT))
        return time.monotonic() - start, str(caught.value)
    finally:
        autotune._seconds = original
        if dist.get_rank() != LATE:
            store.add(key, 1)


def test_measuring_keeps_to_the_timeout_of_connect(pool: RankPool) -> None:
    """Ranks that wait for their link's turn time out, too."""
    for rank, (seconds, text) in enumerate(pool.run(late_in_autotune, "late in autotune")):
        assert "took too long: give connect a longer timeout" in text, f"rank {rank}"
        assert in_time(seconds, LIMIT + 5), f"rank {rank}"
        assert seconds > LIMIT - 0.5, f"rank {rank}"
