"""Tensors that a chunk keeps for the next chunk of its node: not sent, and trained as in the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_jobs import assert_equal_grads, assert_equal_losses, build
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import ldt
from ldt.plan import Costs, Kind, optimize
from ldt.runtime import TensorSpec
from ldt.runtime.common.kept import Kept
from ldt.testing import RankPool, toy_loss
from ldt.topology import Topology

WORLD_SIZE = 4
WIDTH, ROWS, MICROBATCHES = 8, 4, 4


class Skip(nn.Module):
    """Adds what was kept for it. With ``keeps`` it keeps its result, ids without a gradient, and what it was given."""

    def __init__(self, keeps: bool, again: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keeps, self.again, self.checkpointed = keeps, again, checkpointed

    def hidden(self, x: Tensor, *kept: Tensor) -> Tensor:
        for tensor in kept:
            x = x + self.mix(tensor.float())
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor, *kept: Tensor) -> Any:
        hidden = (
            checkpoint(self.hidden, x, *kept, use_reentrant=False)
            if self.checkpointed
            else self.hidden(x, *kept)
        )
        if not self.keeps:
            return hidden + self.mix(hidden)
        first = kept[0] if kept and self.again else x
        ids = torch.arange(WIDTH).expand(ROWS, WIDTH).contiguous()
        return ldt.keep(hidden), hidden + self.mix(hidden), ldt.keep(first), ldt.keep(ids)


def skips(topology: Topology, **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    last = {topology.chunks_of(stage)[-1] for stage in range(topology.num_stages)}
    return [Skip(chunk not in last, **options) for chunk in range(topology.num_chunks)]


def samples(number: int = MICROBATCHES, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (number, 2, ROWS, WIDTH)
    return [(pair[0], pair[1]) for pair in torch.randn(shape, generator=generator)]


def whole_model(topology: Topology, chunks: Sequence[nn.Module], x: Tensor) -> Tensor:
    kept: dict[int, list[Tensor]] = {}
    sent = [x]
    for index, chunk in enumerate(chunks):
        stage = topology.stage_of(index)
        output = chunk(*sent, *kept.pop(stage, []))
        entries = [output] if isinstance(output, Tensor) else output
        sent = [entry for entry in entries if isinstance(entry, Tensor)]
        kept[stage] = [entry.tensor for entry in entries if isinstance(entry, Kept)]
    return sent[0]


def unsplit(
    topology: Topology, chunks: Sequence[nn.Module], batches: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[nn.Module]]:
    """Return the losses and copies of the chunks with the gradients of the unsplit model."""
    model = copy.deepcopy(list(chunks))
    losses = []
    for x, target in batches:
        loss = toy_loss(whole_model(topology, model, x), target)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses, model


def compare(topology: Topology, options: dict[str, Any] | None = None, **pipeline: Any) -> dict[str, int]:
    """Compare two steps and an eval with the unsplit model. Returns the bytes of each channel in a step."""
    chunks = skips(topology, **(options or {}))
    batches = samples()
    losses, reference = unsplit(topology, chunks, batches)
    if not topology.is_looped:
        pipeline["plan"] = optimize(topology, MICROBATCHES, Costs(forward=1.0, backward=2.0))
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        made = build(mesh, chunks, **pipeline)
        given = batches if mesh.is_edge else None
        made.validate(given)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            result = made.step(given)
            if mesh.is_edge:
                assert_equal_losses(result, losses)
            assert_equal_grads(mesh, chunks, reference)
        if topology.is_looped:
            evaluated = made.eval(given)
            if mesh.is_edge:
                assert_equal_losses(evaluated, losses)
        return {name: traffic.bytes for name, traffic in result.stats.channels.items()}


TOPOLOGIES = [
    Topology([1]),
    Topology([1], laps=2),
    Topology([1, 1]),
    Topology([1, 1, 1], laps=2),
    Topology([1, 1, 1], placement=[0, 1, 2, 2, 1, 0]),
    Topology([1, 1, 1], placement=[0, 0, 2, 1, 1, 2, 0, 0]),
    Topology([2, 2], laps=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.to_text)
def test_a_step_equals_the_unsplit_model(pool: RankPool, topology: Topology) -> None:
    pool.run(compare, topology, ranks=range(topology.world_size), timeout=60)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"checkpointed": True}, {}),
    ({}, {"free_outputs": False}),
    ({}, {"check_finite": True}),
    ({"again": False}, {}),
]


@pytest.mark.parametrize(("of_chunks", "of_pipeline"), OPTIONS, ids=str)
def test_options(pool: RankPool, of_chunks: dict[str, Any], of_pipeline: dict[str, Any]) -> None:
    pool.run(with_options, of_chunks, of_pipeline, ranks=[0, 1])


def with_options(of_chunks: dict[str, Any], of_pipeline: dict[str, Any]) -> None:
    compare(Topology([1, 1], laps=2), of_chunks, **of_pipeline)


# -- plans -------------------------------------------------------------------------------------------------------


def planned(split: bool) -> None:
    topology = Topology([1, 1], laps=2)
    costs = Costs(forward=1.0, backward=2.0, weight=1.0)
    plan = optimize(topology, MICROBATCHES, costs, split_backward=split)
    assert any(action.kind is Kind.W for row in plan.rows.values() for action in row) == split
    chunks, batches = skips(topology), samples()
    losses, reference = unsplit(topology, chunks, batches)
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        result = build(mesh, chunks, plan=plan).step(batches if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, losses)
        assert_equal_grads(mesh, chunks, reference)


@pytest.mark.parametrize("split", [False, True])
def test_planned(pool: RankPool, split: bool) -> None:
    pool.run(planned, split, ranks=[0, 1])


def two_replicas(edge_dp: int) -> None:
    topology = Topology([1, 1], dp=2, edge_dp=edge_dp, laps=2)
    chunks = skips(topology)
    of_edges = [samples(seed=seed) for seed in range(edge_dp)]
    _, reference = unsplit(topology, chunks, [pair for batch in of_edges for pair in batch])
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        build(mesh, chunks).step(of_edges[mesh.replica] if mesh.is_edge else None)
        for index in topology.chunks_of(mesh.stage):
            for mine, theirs in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("edge_dp", [1, 2])
def test_replicas(pool: RankPool, edge_dp: int) -> None:
    """The replicas' gradients are summed in another order than those of the unsplit model."""
    pool.run(two_replicas, edge_dp, ranks=range(2 + edge_dp))


# -- what leaves a node ------------------------------------------------------------------------------------------


def traffic(audit: Path) -> dict[str, int]:
    topology = Topology([1, 1])
    chunks, batches = skips(topology), samples()
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        made = build(mesh, chunks, audit=audit if mesh.is_edge else None)
        result = made.step(batches if mesh.is_edge else None)
        return {name: counted.bytes for name, counted in result.stats.channels.items()}


def test_kept_tensors_do_not_leave(pool: RankPool, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    channels, _ = pool.run(traffic, audit, ranks=[0, 1])
    activation = ROWS * WIDTH * 4 * MICROBATCHES
    assert len(channels) == 4
    assert set(channels.values()) == {activation}
    sent = [line for line in audit.read_text().splitlines() if '"channel"' in line]
    assert len(sent) == 2 * MICROBATCHES
    assert all(line.count(f"[{ROWS}, {WIDTH}]") == 1 for line in sent), sent


# -- sharded tensors ---------------------------------------------------------------------------------------------


class KeepsShards(nn.Module):
    """Keeps its result split over the ranks of its node, if there are several."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(WIDTH, WIDTH), keeps
        self.mesh: ldt.Mesh | None = None

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Any:
        if self.mesh is not None and kept is not None:
            assert isinstance(kept, DTensor)
            assert kept.placements == (Shard(1),)
            kept = kept.full_tensor()
        hidden = torch.tanh(self.linear(x if kept is None else x + kept))
        if self.mesh is None:
            return (hidden, ldt.keep(hidden)) if self.keeps else hidden
        whole = DTensor.from_local(hidden, self.mesh.tp_mesh, [Replicate()])
        return (hidden, ldt.keep(whole.redistribute(placements=[Shard(1)]))) if self.keeps else hidden


def sharded() -> None:
    topology = Topology([2, 2], laps=2)
    torch.manual_seed(0)
    chunks = [KeepsShards(keeps=chunk < 3) for chunk in range(topology.num_chunks)]
    losses, reference = unsplit(topology, chunks, samples())
    with ldt.connect(topology) as mesh:
        for chunk in chunks:
            chunk.mesh = mesh
        made = build(mesh, chunks)
        made.validate(samples() if mesh.is_edge else None)
        result = made.step(samples() if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, losses)
        assert_equal_grads(mesh, chunks, reference)


def test_kept_shards(pool: RankPool) -> None:
    pool.run(sharded)


# -- what is refused ---------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """Chunks that ``how`` makes wrong, each with one parameter."""

    def __init__(self, how: str, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how, self.index = how, index
        self.memory: Tensor | None = None

    def forward(self, x: Tensor, *kept: Tensor) -> Any:
        hidden = self.linear(x)
        if self.index == 0 and self.how == "changed":
            self.memory = hidden.detach()
            return hidden * 1.0, ldt.keep(hidden)
        if self.index == 1 and self.how == "by the cloud":
            return hidden, ldt.keep(hidden)
        if self.index == 2 and self.how == "by the tail":
            return {"output": ldt.keep(hidden)}
        if self.index == 2 and self.how == "changed":
            return hidden + kept[0].add_(1.0)
        return hidden


def faulty(how: str, training: bool) -> str:
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        made = build(mesh, [Faulty(how, index) for index in range(3)])
        try:
            (made.step if training else made.eval)(samples() if mesh.is_edge else None)
        except ldt.LdtError as error:
            return str(error)
    return "done"


FAULTS = {
    "by the cloud": "chunk 1 keeps a tensor (ldt.keep), but stage 1 has no later chunk to take it",
    "by the tail": "chunk 2 keeps a tensor (ldt.keep), but it is the last chunk",
    "changed": "chunk 2 changes a tensor in place that chunk 0 kept (ldt.keep) for microbatch 0",
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", FAULTS)
def test_what_cannot_be_right_is_refused_on_all_ranks(pool: RankPool, how: str, training: bool) -> None:
    for text in pool.run(faulty, how, training, ranks=[0, 1]):
        assert FAULTS[how] in text


def test_only_a_tensor_is_kept() -> None:
    with pytest.raises(TypeError, match="takes a tensor that the chunk returns, got list"):
        ldt.keep([torch.ones(1)])  # type: ignore[arg-type]


# -- declared outputs --------------------------------------------------------------------------------------------


class Declared(Skip):
    """Its forward depends on values."""

    def forward(self, x: Tensor, *kept: Tensor) -> Any:
        assert x.sum().item() < 1e9
        return super().forward(x, *kept)

    def output_spec(self, x: TensorSpec, *kept: TensorSpec) -> Any:
        spec = TensorSpec(x.shape, x.dtype, requires_grad=True)
        first = kept[0] if kept else x
        return ldt.keep(spec), spec, ldt.keep(first), ldt.keep(TensorSpec(x.shape, torch.int64))


def declared() -> None:
    topology = Topology([1, 1], laps=2)
    chunks = skips(topology)
    for chunk in chunks[:3]:
        chunk.__class__ = Declared
    batches = samples()
    losses, reference = unsplit(topology, chunks, batches)
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        result = build(mesh, chunks).step(batches if mesh.is_edge else None)
        if mesh.is_edge:
            assert_equal_losses(result, losses)
        assert_equal_grads(mesh, chunks, reference)


def test_output_specs_declare_what_is_kept(pool: RankPool) -> None:
    pool.run(declared, ranks=[0, 1])
