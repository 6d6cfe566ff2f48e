"""Whole steps on late streams equal the unsplit model bit for bit, with or without the stand-in for HCCL.

Gradients of replicas are sums in another order: equal but for rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import npu
import pytest
import torch
import torch.distributed as dist

import ldt
from ldt.plan import Costs, optimize
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

WORLD_SIZE = 3

Batch = list[tuple[torch.Tensor, torch.Tensor]]


def assert_equal_step(pipeline: ldt.Pipeline, chunks: list[Any], batch: Batch) -> None:
    mesh = pipeline.mesh
    for chunk in chunks:
        chunk.zero_grad()
    losses, reference = unsplit_step(chunks, copy.deepcopy(batch), toy_loss)
    same = torch.equal if mesh.topology.dp == 1 else torch.allclose
    result = pipeline.step(batch if mesh.is_edge else None)
    if mesh.is_edge:
        assert result.losses is not None
        assert all(map(torch.equal, result.losses, losses))
    for index in mesh.topology.chunks_of(mesh.stage):
        for got, expected in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
            assert got.grad is not None
            assert same(got.grad, expected.grad)
            assert expected.grad.abs().sum() > 0


def steps(topology: Topology, seed: int, fit: bool, transport: str, options: dict[str, Any]) -> None:
    if dist.get_rank() >= topology.world_size:
        return
    of_device, of_mesh = npu.TRANSPORTS[transport]
    options |= of_mesh
    with npu.late(seed, 500, **of_device) as device, torch.Stream(device):
        chunks = [chunk.to(device) for chunk in toy_chunks(topology, width=32)]
        batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(6, width=32)]
        with ldt.connect(topology, "hccl", ranks=range(topology.world_size), **options) as mesh:
            assert mesh.device == device
            used = {channel: mesh.transport_of(channel) for channel in mesh.endpoints}
            in_cloud = {channel for channel in used if channel.source.stage and channel.target.stage}
            in_site = "copy_engine" if transport in ("copy engine", "host") else "c10d"
            assert {used[channel] for channel in in_cloud} <= {in_site}
            assert {used[channel] for channel in used.keys() - in_cloud} == {options["transport"]}
            mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
            loss_fn = toy_loss if mesh.is_edge else None
            pipeline = ldt.Pipeline(mine, mesh, loss_fn=loss_fn)
            if fit:
                costs = Costs.measure(pipeline, batch if mesh.is_edge else None, steps=1)
                plan = optimize(topology, len(batch), costs, split_backward=True, lanes=mesh.lanes)
                pipeline = ldt.Pipeline(mine, mesh, plan, loss_fn)
            for _ in range(2):
                pipeline.eval(batch[:2] if mesh.is_edge else None)
                assert_equal_step(pipeline, chunks, batch)


@pytest.mark.parametrize("transport", npu.TRANSPORTS)
@pytest.mark.parametrize(
    ("topology", "fit", "options"),
    [
        (Topology([1, 2]), False, {}),
        (Topology([1, 1, 1]), False, {"lanes": "paired"}),
        (Topology([1, 1, 1]), True, {}),
        (Topology([1, 1], laps=2), False, {}),
        (Topology([1, 2]), False, {"transfer": "auto"}),
        (Topology([1, 1], dp=2, edge_dp=1), False, {}),
    ],
    ids=["two in a stage", "paired lanes", "fitted plan", "two laps", "ways of transfer", "replicas"],
)
def test_steps_equal_the_unsplit_model(
    pool: RankPool, topology: Topology, fit: bool, options: dict[str, Any], transport: str
) -> None:
    pool.run(steps, topology, 7, fit, transport, options, timeout=60)
