"""What a chunk runner keeps of a microbatch between forward and backward, and when it releases it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ldt.plan import ushape
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.step_state import StepState
from ldt.topology import Topology

SPECS = (TensorSpec((4, 16), torch.float32, requires_grad=True),)


def run_forward(free_outputs: bool) -> tuple[ChunkRunner, Any, torch.Tensor]:
    """Return a runner with the graph of one microbatch, an object held by that graph, and the output."""
    runner = ChunkRunner(1, nn.Linear(16, 16), free_outputs)
    work = StepState(ushape(Topology([1, 1]), 1), [], [{}])
    received = torch.randn(4, 16)
    (output,) = runner.detach_outputs(0, runner.forward(work, 0, [received], SPECS))
    return runner, weakref.ref(received.untyped_storage()), output


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("free_outputs", [True, False])
@pytest.mark.parametrize("way", ["backward", "drop"])
def test_a_graph_goes_without_the_collector(way: str, free_outputs: bool) -> None:
    runner, held, output = run_forward(free_outputs)
    assert held() is not None
    assert runner.num_graphs == 1
    if way == "backward":
        work = StepState(ushape(Topology([1, 1]), 1), [], [{}])
        (grad,) = runner.backward(work, 0, [torch.ones_like(output)])
        assert torch.equal(grad, torch.ones(4, 16) @ runner.module.weight)
    else:
        runner.drop()
    assert runner.num_graphs == 0
    assert held() is None
