"""``ldt.scalars``: the names, the figures of one rank and of all, and what TensorBoard reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_jobs import build

import ldt
from ldt.runtime import StepResult, StepStats, Traffic
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
MICROBATCHES = 4
MESSAGE = 4 * 40 * 4  # bytes: batch 4, width 40, fp32
STEP = {f"step/{name}" for name in ("seconds", "computing", "waiting", "idle", "bubble")}
LINKS = {
    f"link/{way}/{name}"
    for way in ("0_to_1", "1_to_0")
    for name in ("bytes", "bytes_per_second", "compression")
}


def loss_and_accuracy(output: torch.Tensor, target: torch.Tensor) -> Any:
    return toy_loss(output, target), {"accuracy": 0.25}


def measured(compression: Any) -> Any:
    chunks = toy_chunks(TOPOLOGY, width=40)
    with ldt.connect(TOPOLOGY, compression=compression) as mesh:
        pipeline = build(mesh, chunks, loss_and_accuracy)
        result = pipeline.step(toy_microbatches(MICROBATCHES, width=40) if mesh.is_edge else None)
        gathered = pipeline.gather_stats(result)
        together = None if gathered is None else ldt.scalars(gathered)
        if result.loss is not None:
            assert ldt.scalars(result)["loss"] == float(result.loss)
        return ldt.scalars(result), together


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_figures_of_one_rank_and_of_all(pool: RankPool, compression: str) -> None:
    (edge, together), (first, _), (last, _) = pool.run(measured, compression)
    ratio = 1.0 if compression == "none" else 2.0
    assert edge.keys() == STEP | LINKS | {"loss", "metrics/accuracy", "link/outages"}
    assert edge["metrics/accuracy"] == 0.25
    for way in ("0_to_1", "1_to_0"):  # an activation and a gradient of each microbatch each way
        assert edge[f"link/{way}/bytes"] == 2 * MICROBATCHES * MESSAGE / ratio
        assert edge[f"link/{way}/compression"] == ratio
        assert edge[f"link/{way}/bytes_per_second"] == edge[f"link/{way}/bytes"] / edge["step/seconds"]
    # Each cloud stage has one of the two channels that go up, and one of those that come down.
    assert [one["link/0_to_1/bytes"] for one in (first, last)] == [MICROBATCHES * MESSAGE / ratio] * 2
    nodes = {f"node/{stage}.0/{name}" for stage in range(3) for name in ("computing", "waiting", "idle")}
    assert together.keys() == STEP | LINKS | nodes | {"link/outages"}
    assert {name: together[name] for name in LINKS if name.endswith(("bytes", "compression"))} == {
        name: edge[name] for name in LINKS if name.endswith(("bytes", "compression"))
    }


def stats(rank: int, computing: float, waiting: float) -> StepStats:
    return StepStats(Topology([1, 1]), rank, 4.0, computing, waiting, {"F0:0.0->1.0": Traffic(2, 80)})


def test_means_over_nodes() -> None:
    found = ldt.scalars([stats(0, 3.0, 0.5), stats(1, 1.0, 2.5)])
    assert found["step/bubble"] == pytest.approx(0.5)
    assert (found["step/seconds"], found["step/computing"], found["step/waiting"]) == (4.0, 2.0, 1.5)
    assert (found["node/1.0/computing"], found["node/0.0/idle"]) == (1.0, 0.5)
    assert (found["link/0_to_1/bytes"], found["link/0_to_1/bytes_per_second"]) == (80.0, 20.0)


def test_a_result_with_a_norm_and_without_a_loss() -> None:
    found = ldt.scalars(StepResult(stats(1, 1.0, 2.5), grad_norm=torch.tensor(1.5)))
    assert found["grad_norm"] == 1.5
    assert "loss" not in found
    assert found["step/bubble"] == pytest.approx(0.75)


def test_tensorboard_reads_them_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    figures = ldt.scalars(StepResult(stats(0, 1.0, 2.5), loss=torch.tensor(0.5)))
    with SummaryWriter(tmp_path) as writer:  # type: ignore[no-untyped-call]
        for step in (7, 8):
            for name, value in figures.items():
                writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == figures.keys(), "no name is changed"
    for name, value in figures.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(7, value), (8, value)]
