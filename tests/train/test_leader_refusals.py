"""What ranks that follow would refuse is an error of the edge, before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ldt
from ldt.runtime.control.command import MAX_RATES, Command
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
TOPOLOGY = Topology([1, 1])


def refusals() -> None:
    chunks = toy_chunks(TOPOLOGY)
    with ldt.connect(TOPOLOGY) as mesh:
        mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        if not mesh.is_edge:
            ldt.follow(pipeline, torch.optim.SGD(pipeline.parameters()), learning_rate="edge")
            return
        spare = [{"params": [nn.Parameter(torch.ones(1))], "lr": float(rate)} for rate in range(MAX_RATES)]
        optimizer = torch.optim.SGD([{"params": [*pipeline.parameters()]}, *spare])
        batch = toy_microbatches(2)
        with ldt.Leader(pipeline, optimizer) as leader:
            with pytest.raises(ValueError, match=f"at most {MAX_RATES} different learning rates, got 401"):
                leader.step(batch)
            with pytest.raises(ValueError, match="got 401"):
                leader.save("nowhere", step=1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "is_autocast_enabled", lambda device: True)
                patch.setattr(torch, "get_autocast_dtype", lambda device: torch.float32)
                for call in (leader.step, leader.eval):
                    with pytest.raises(ValueError, match="bfloat16 or float16, got autocast to float32"):
                        call(batch, **({"update": False} if call == leader.step else {}))
            leader.step(batch, update=False)


def test_what_no_command_can_say_is_refused_on_the_edge(pool: RankPool) -> None:
    pool.run(refusals, timeout=60)


def test_the_most_learning_rates_fit_into_a_command() -> None:
    command = Command("step", True, 1.5, 2.0, tuple(map(float, range(MAX_RATES))), "bfloat16", 10**12)
    assert Command.from_bytes(command.to_bytes()) == command
