"""Tests that each call begins with the first replica's buffers, in DistributedDataParallel and in plain chunks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ldt
from ldt.testing import RankPool, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
STEPS = 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("flags", torch.tensor([False, False]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and self.training:
            self.flags[0] = True
            self.cache += x.detach().flatten()[:3]
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def model(topology: Topology) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Normed() for _ in range(topology.num_chunks)]


def batches(step: int, replica: int) -> list[Any]:
    return toy_microbatches(2, batch=6, seed=10 * step + replica)


def expected(chunks: list[nn.Module], synced: bool, own: int) -> list[nn.Module]:
    """Return the chunks of replica ``own`` after all steps; the weights do not change."""
    replicas = [copy.deepcopy(chunks) for _ in range(2)]
    for step in range(STEPS):
        if synced:
            pairs = (nn.ModuleList(replicas[index]).buffers() for index in (1, 0))
            for local, first in zip(*pairs, strict=True):
                local.copy_(first)
        for replica, made in enumerate(replicas):
            for inputs, _ in batches(step, replica):
                nn.Sequential(*made)(inputs)
    return replicas[own]


def trained(variant: str, path: Path) -> list[list[float]]:
    topology = Topology([1, 1], dp=2)
    chunks = model(topology)
    with ldt.connect(topology) as mesh:
        local = copy.deepcopy([chunks[index] for index in topology.chunks_of(mesh.stage)])
        given: list[nn.Module] = list(local)
        if variant == "script":
            for chunk in local:
                chunk.norm = torch.jit.script(chunk.norm)
        if variant.startswith("ddp"):
            group = mesh.dp_mesh.get_group()
            given = [
                DistributedDataParallel(
                    chunk, process_group=group, broadcast_buffers=variant != "ddp without"
                )
                for chunk in local
            ]
        pipeline = ldt.Pipeline(
            given, mesh, loss_fn=toy_loss, sync_buffers=variant not in ("off", "ddp, others off")
        )
        for step in range(STEPS):
            pipeline.step(batches(step, mesh.replica) if mesh.is_edge else None)
        reference = expected(chunks, variant not in ("off", "ddp without"), mesh.replica)
        for index, chunk in zip(topology.chunks_of(mesh.stage), local, strict=True):
            for name, buffer in chunk.named_buffers():
                if name != "cache":  # plain chunks do not broadcast it
                    torch.testing.assert_close(buffer, reference[index].get_buffer(name), msg=name)
        cache = local[0].cache.clone()
        ldt.save_checkpoint(path, pipeline, step=1)
        assert ldt.load_checkpoint(path, pipeline) is not None
        first = expected(chunks, variant not in ("off", "ddp without"), 0)
        for index, chunk in zip(topology.chunks_of(mesh.stage), local, strict=True):
            torch.testing.assert_close(chunk.norm.running_mean, first[index].norm.running_mean)
        return [cache.tolist(), reference[topology.chunks_of(mesh.stage)[0]].cache.tolist()]


@pytest.mark.parametrize("variant", ["plain", "script", "off", "ddp", "ddp without", "ddp, others off"])
def test_running_statistics_of_replicas(pool: RankPool, tmp_path: Path, variant: str) -> None:
    for cache, of_ddp in pool.run(trained, variant, tmp_path):
        assert (cache == pytest.approx(of_ddp, rel=1e-4)) or variant in ("plain", "script")


def evaluated() -> list[float]:
    """Evaluate the same microbatch on both cloud replicas."""
    topology = Topology([1, 1], dp=2, edge_dp=1)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        local = [model(topology)[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(local, mesh, loss_fn=toy_loss)
        pipeline.step(toy_microbatches(4, batch=6) if mesh.is_edge else None)
        for chunk in local:
            chunk.eval()
        batch = toy_microbatches(1, batch=6) * 2  # one for each replica
        losses = pipeline.eval(batch if mesh.is_edge else None).losses or []
        return [loss.item() for loss in losses]


def test_replicas_evaluate_alike(pool: RankPool) -> None:
    first, second = pool.run(evaluated, ranks=range(3))[0]
    assert first == second


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return self.linear(x)  # type: ignore[no-any-return]


def of_replicas(mesh: ldt.Mesh, kind: type[nn.Module]) -> ldt.Pipeline:
    torch.manual_seed(mesh.stage)
    local = [kind() for _ in mesh.topology.chunks_of(mesh.stage)]
    return ldt.Pipeline(local, mesh, loss_fn=toy_loss)


def growing() -> str:
    with ldt.connect(Topology([1, 1], dp=2)) as mesh:
        pipeline = of_replicas(mesh, Growing)
        batch = toy_microbatches(2) if mesh.is_edge else None
        pipeline.step(batch)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(batch)
        return str(caught.value)


def test_a_buffer_that_grows(pool: RankPool) -> None:
    for text in pool.run(growing):
        assert "buffer seen of a Growing changed its shape from [0], so it cannot be broadcast" in text
        assert "sync_buffers=False" in text


def synced() -> list[Any]:
    topology = Topology([1, 1], dp=2)
    with ldt.connect(topology) as mesh:
        texts: list[Any] = [mesh.stage, list(mesh.rank_info.replica_ranks)]
        for group in (None, mesh.dp_mesh.get_group(), mesh.tp_mesh.get_group()):
            torch.manual_seed(mesh.stage)
            local: list[nn.Module] = [nn.Sequential(Normed(), nn.SyncBatchNorm(16, process_group=group))]
            local += [Normed() for _ in topology.chunks_of(mesh.stage)[1:]]
            try:
                ldt.Pipeline(local, mesh, loss_fn=toy_loss)
            except ValueError as error:
                texts.append(str(error))
        return texts


def test_batch_norms_that_wait_for_other_nodes_are_refused(pool: RankPool) -> None:
    for stage, replicas, *texts in pool.run(synced):
        groups = [[0, 1, 2, 3], replicas]
        sentences = [f"chunk {stage}: 1 is a SyncBatchNorm over ranks {ranks}, which run" for ranks in groups]
        assert [text[: len(sentence)] for text, sentence in zip(texts, sentences, strict=True)] == sentences


class Filling(nn.Module):
    """Creates a buffer in its first forward, as for masks and rotary tables."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1])
        return self.linear(x) * self.mask  # type: ignore[no-any-return]


def filling() -> None:
    with ldt.connect(Topology([1, 1], dp=2)) as mesh:
        pipeline = of_replicas(mesh, Filling)
        for _ in range(3):
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)


def test_a_buffer_that_the_first_forward_makes(pool: RankPool) -> None:
    pool.run(filling)
