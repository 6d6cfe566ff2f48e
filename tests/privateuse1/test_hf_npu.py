"""Random weights and adapters on the test device: drawn by its own generator, the same however the model is split."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import npu
import pytest
import torch

from ldt.testing import RankPool

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from hf_draws import check_adapters, check_nan, check_weights

WORLD_SIZE = 2  # devices, each the current one of a rank


def on_another_device(check: Callable[[torch.device], None]) -> None:
    with npu.late(2, 300) as device:
        check(torch.device("npu", 1 - device.index))
        check(device)


@pytest.mark.parametrize("check", [check_weights, check_adapters, check_nan])
def test_draws_on_the_device(pool: RankPool, check: Callable[[torch.device], None]) -> None:
    pool.run(on_another_device, check, timeout=60)
