"""Random weights and adapters on a GPU: the same however the model is split, and the host waits once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ldt.integrations import hf

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from hf_draws import check_adapters, check_nan, check_weights
from hf_models import text_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("check", [check_weights, check_adapters, check_nan])
def test_draws_on_a_gpu(check: Callable[[torch.device], None]) -> None:
    check(torch.device("cuda", torch.cuda.device_count() - 1))


def test_the_host_waits_once() -> None:
    chunks = hf.split(text_config("llama", num_hidden_layers=12), [6, 6]).build([0, 1], device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hf.init_weights(chunks, seed=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == 1, waits


def test_large_weights_are_drawn_as_transformers_draws_them() -> None:
    config = text_config("llama", hidden_size=1024, intermediate_size=4096, initializer_range=0.5)
    chunks = hf.split(config, [5, 0]).build([0], device="cuda", dtype=torch.bfloat16)
    hf.init_weights(chunks, seed=0)
    weights = hf.state_dict(chunks)
    assert weights["model.layers.3.mlp.up_proj.weight"].float().std().item() == pytest.approx(0.5, rel=0.01)
    assert weights["model.layers.3.mlp.up_proj.weight"].float().mean().item() == pytest.approx(0, abs=0.002)
