"""Tensors that late streams are sending are not changed by later work on the current stream."""

from __future__ import annotations

import npu
import pytest
import torch

import ldt
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool
from ldt.testing.late_steps import late_steps
from ldt.topology import Topology

WORLD_SIZE = 2


def run(transport: TransportChoice, split: bool, held: bool) -> None:
    with (
        npu.late(3, 500) as device,
        torch.Stream(device),
        ldt.connect(Topology([1, 1]), "hccl", transport=transport) as mesh,
    ):
        late_steps(mesh, 300, 4, split=split, held=held)


@pytest.mark.parametrize("transport", ["c10d", "copy_engine", "host"])
@pytest.mark.parametrize(("split", "held"), [(False, True), (True, True), (False, False)])
def test_late_sends_carry_the_computed_values(
    pool: RankPool, transport: TransportChoice, split: bool, held: bool
) -> None:
    pool.run(run, transport, split, held, timeout=60)
