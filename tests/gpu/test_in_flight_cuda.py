"""Later work on the current stream does not modify tensors in flight. On one GPU, ranks share it."""

from __future__ import annotations

import pytest
import torch
from sharing import my_device

import ldt
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool
from ldt.testing.late_steps import late_steps
from ldt.topology import Topology

WORLD_SIZE = 2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(transport: TransportChoice, split: bool, held: bool) -> None:
    """12 MB per message, so that a transfer takes a while."""
    with ldt.connect(Topology([1, 1]), "nccl", device=my_device(), transport=transport) as mesh:
        late_steps(mesh, 3000, 1024, split=split, held=held, steps=3, error=1e-5)


@pytest.mark.parametrize("transport", ["copy_engine", "host", "nccl", "c10d"])
@pytest.mark.parametrize(("split", "held"), [(False, True), (True, True), (False, False)])
def test_late_sends_carry_the_computed_values(
    pool: RankPool, transport: TransportChoice, split: bool, held: bool
) -> None:
    pool.run(run, transport, split, held, timeout=60)
