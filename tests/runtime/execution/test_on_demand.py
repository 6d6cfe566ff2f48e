"""Calls whose messages are launched on demand, as those in which kernels load: they end, and equal the unsplit model.

The CPU never needs them, so the tests ask for them.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ldt
from ldt.errors import LdtError, RemoteStageError
from ldt.plan import Action, Plan, add_communication, ushape
from ldt.runtime import TensorSpec
from ldt.runtime.execution.on_demand import OnDemand
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.testing.models import on_backward
from ldt.topology import Node, Topology


def on_demand(pipeline: ldt.Pipeline) -> ldt.Pipeline:
    """Take all shapes of the pipeline for new."""
    pipeline._steps._first_use._waits = True
    return pipeline


def steps(topology: Topology, split: bool, options: dict[str, Any]) -> None:
    plan = _split(topology) if split else None
    chunks, batch = toy_chunks(topology, width=16), toy_microbatches(4, width=16)
    with ldt.connect(topology, ranks=range(topology.world_size), **options) as mesh:
        pipeline = on_demand(build(mesh, chunks, plan=plan))
        step_and_compare(mesh, pipeline, chunks, batch)
        step_and_compare(mesh, pipeline, chunks, batch)
        outputs = pipeline.eval(batch if mesh.is_edge else None).outputs
        if mesh.is_edge:
            assert outputs is not None
            whole = nn.Sequential(*chunks)
            assert all(torch.equal(output, whole(x)) for output, (x, _) in zip(outputs, batch, strict=True))


def _split(topology: Topology) -> Plan:
    """The fixed order with split backwards."""
    plan = ldt.plan.remove_communication(ushape(topology, 4))
    rows = {
        node: [
            part
            for action in row
            for part in (
                [action._replace(kind=ldt.plan.Kind.I), action._replace(kind=ldt.plan.Kind.W)]
                if action.kind is ldt.plan.Kind.B and action.chunk not in (0, topology.tail)
                else [action]
            )
        ]
        for node, row in plan.rows.items()
    }
    return add_communication(plan.with_rows(rows, None), "dedicated")


def backward_late() -> Plan:
    """The edge returns to its first chunk last; stage 1 sends to stages 0 and 2 over one lane."""
    rows = {
        0: "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        1: "1F0 1B0 1F1 1B1",
        2: "2F0 2B0 2F1 2B1",
    }
    actions = {Node(stage, 0): [Action.parse(text) for text in row.split()] for stage, row in rows.items()}
    return add_communication(Plan(Topology([1, 1, 1]), 2, actions), "paired")


@pytest.mark.parametrize(
    ("topology", "split", "options"),
    [
        (Topology([1, 1, 1]), False, {}),
        (Topology([1, 1, 1]), False, {"lanes": "paired"}),
        (Topology([1, 1, 1]), True, {}),
        (Topology([1, 1], laps=2), False, {"lanes": "paired"}),
        (Topology([1, 2]), False, {}),
        (Topology([2, 2]), False, {"transfer": "scatter"}),
        (Topology([2, 2]), False, {"transfer": "direct"}),
        (Topology([2, 2]), False, {"transfer": "auto"}),
        (Topology([2, 1]), False, {"transfer": "auto"}),
    ],
    ids=str,
)
def test_steps_equal_the_unsplit_model(
    pool: RankPool, topology: Topology, split: bool, options: dict[str, Any]
) -> None:
    pool.run(steps, topology, split, options, ranks=range(topology.world_size))


def late_backward() -> None:
    topology = Topology([1, 1, 1])
    chunks, batch = toy_chunks(topology, width=16), toy_microbatches(2, width=16)
    with ldt.connect(topology, ranks=range(3), lanes="paired") as mesh:
        pipeline = on_demand(build(mesh, chunks, plan=backward_late()))
        step_and_compare(mesh, pipeline, chunks, batch)


def test_a_send_does_not_wait_for_one_to_another_node(pool: RankPool) -> None:
    pool.run(late_backward, ranks=range(3))


class Declared(ToyChunk):
    """Takes some time, another on each rank. Declares its output, as fully_shard does not run on fake tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03 * random.random())
        return on_backward(super().forward(x), lambda: time.sleep(0.03 * random.random()))

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


def replicas(edge_dp: int, sharded: bool) -> None:
    topology = Topology([1, 1], dp=2, edge_dp=edge_dp)
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    chunks = [Declared(16) for _ in range(topology.num_chunks)]
    batches = [toy_microbatches(4, seed=seed) for seed in range(edge_dp)]
    unsplit = [unsplit_step(chunks, batch, toy_loss)[1] for batch in batches]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        local = [copy.deepcopy(chunks[index]) for index in topology.chunks_of(mesh.stage)]
        if sharded and topology.replicas(mesh.stage) > 1:
            for chunk in local:
                fully_shard(chunk, mesh=mesh.dp_mesh)
        pipeline = on_demand(ldt.Pipeline(local, mesh, loss_fn=toy_loss))
        pipeline.step(batches[mesh.replica] if mesh.is_edge else None)
        for index, module in zip(topology.chunks_of(mesh.stage), local, strict=True):
            references = zip(*(reference[index].parameters() for reference in unsplit), strict=True)
            for parameter, same in zip(module.parameters(), references, strict=True):
                grad = parameter.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                torch.testing.assert_close(whole, sum(p.grad for p in same) / edge_dp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("edge_dp", "sharded"), [(2, True), (1, True), (2, False), (1, False)])
def test_replicas_do_not_wait_for_one_another_without_end(
    pool: RankPool, edge_dp: int, sharded: bool
) -> None:
    for _ in range(3):
        pool.run(replicas, edge_dp, sharded, ranks=range(edge_dp + 2))


class Failing(ToyChunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # not in shape inference
            raise ValueError("no more")
        return super().forward(x)  # type: ignore[no-any-return]


def failure() -> str:
    topology = Topology([1, 1, 1])
    chunks = [ToyChunk(16), ToyChunk(16), Failing(16), ToyChunk(16)]
    try:
        with ldt.connect(topology, ranks=range(3)) as mesh:
            pipeline = on_demand(build(mesh, chunks))
            pipeline.step(toy_microbatches(4, width=16) if mesh.is_edge else None)
    except (LdtError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_ranks_raise_if_one_fails(pool: RankPool) -> None:
    texts = pool.run(failure, ranks=range(3))
    assert texts[2] == "ValueError: no more"
    for text in texts[:2]:
        assert text.startswith(RemoteStageError.__name__)
        assert "rank 2" in text


def test_the_tests_run_what_they_say(pool: RankPool) -> None:
    assert pool.run(kind_of_messages, ranks=range(2)) == [True, True]


def kind_of_messages() -> bool:
    topology = Topology([1, 1])
    chunks, batch = toy_chunks(topology, width=16), toy_microbatches(2, width=16)
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = on_demand(build(mesh, chunks))
        found = []
        original = pipeline._steps._messages

        def record(context: Any) -> Any:
            found.append(original(context))
            return found[-1]

        pipeline._steps._messages = record  # type: ignore[method-assign]
        step_and_compare(mesh, pipeline, chunks, batch)
        step_and_compare(mesh, pipeline, chunks, batch)
    return [type(messages) is OnDemand for messages in found] == [True, False]
