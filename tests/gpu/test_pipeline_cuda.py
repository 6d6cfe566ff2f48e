"""A whole step over NCCL equals the unsplit model."""

from __future__ import annotations

import copy

import pytest
import torch
from sharing import my_device

import ldt
from ldt.plan import Costs, Plan, optimize
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def fitted(pipeline: ldt.Pipeline, microbatches: list[tuple[torch.Tensor, torch.Tensor]]) -> Plan:
    """Return a plan with split backwards from costs measured here."""
    mesh = pipeline.mesh
    costs = Costs.measure(pipeline, microbatches if mesh.is_edge else None)
    assert all(seconds > 0 for seconds in (*costs.forward, *costs.backward, *costs.latency))  # type: ignore[misc]
    return optimize(mesh.topology, len(microbatches), costs, split_backward=True, lanes=mesh.lanes)


def steps(laps: int, policy: LanePolicy, fit: bool, transport: TransportChoice) -> float:
    topology = Topology([1, 1], laps=laps)
    device = my_device()
    chunks = [chunk.to(device) for chunk in toy_chunks(topology, width=256)]
    microbatches = [(x.to(device), y.to(device)) for x, y in toy_microbatches(8, width=256)]
    losses, reference = unsplit_step(chunks, copy.deepcopy(microbatches), toy_loss)
    side = torch.cuda.Stream()
    connected = ldt.connect(topology, "nccl", policy, device=device, transport=transport)
    with connected as mesh, torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        if fit:
            plan = fitted(pipeline, microbatches)
            pipeline = ldt.Pipeline(mine, mesh, plan, toy_loss if mesh.is_edge else None)
        for _ in range(3):
            pipeline.eval(microbatches[:2] if mesh.is_edge else None)
            for chunk in chunks:
                chunk.zero_grad()
            result = pipeline.step(microbatches if mesh.is_edge else None)
            side.synchronize()
            for index in topology.chunks_of(mesh.stage):
                for got, expected in zip(
                    chunks[index].parameters(), reference[index].parameters(), strict=True
                ):
                    assert got.grad is not None
                    assert torch.equal(got.grad, expected.grad)
            if mesh.is_edge:
                assert result.losses is not None
                assert all(map(torch.equal, result.losses, losses))
    return float(sum(losses))


@pytest.mark.parametrize("transport", ["c10d", "nccl", "copy_engine", "host"])
@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("laps", [1, 2])
def test_steps_on_a_side_stream_equal_the_unsplit_model(
    pool: RankPool, laps: int, policy: LanePolicy, fit: bool, transport: TransportChoice
) -> None:
    assert all(loss > 0 for loss in pool.run(steps, laps, policy, fit, transport, timeout=120))
