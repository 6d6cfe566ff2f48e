"""Checks on any device that random weights and adapters do not depend on the split and leave generators alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hf_models import text_config

import ldt
from ldt.integrations import hf

__all__ = ["check_adapters", "check_nan", "check_weights"]

Draw = Callable[[Sequence[hf.Chunk], int], dict[str, torch.Tensor]]


def check_weights(device: torch.device) -> None:
    def draw(chunks: Sequence[hf.Chunk], seed: int) -> dict[str, torch.Tensor]:
        hf.init_weights(chunks, seed)
        return hf.state_dict(chunks)

    _check(draw, device)


def check_adapters(device: torch.device) -> None:
    from peft import LoraConfig

    def draw(chunks: Sequence[hf.Chunk], seed: int) -> dict[str, torch.Tensor]:
        hf.add_adapter(chunks, LoraConfig(r=2, target_modules="all-linear"), seed=seed)
        named = (pair for chunk in chunks for pair in chunk.model.named_parameters())
        return {name: parameter.detach() for name, parameter in named if "lora_A" in name}

    _check(draw, device)


def check_nan(device: torch.device) -> None:
    """Weights that transformers does not draw are named, after all others are drawn."""
    chunks = hf.split(text_config("qwen3_next"), [1, 3, 1]).build([1], device=device)
    with pytest.raises(
        ldt.LdtError, match=r"model\.layers\.1\.mlp\.gate\.weight, .*3\.mlp\.gate\.weight, which"
    ):
        hf.init_weights(chunks, seed=0)
    unset = {name for name, tensor in hf.state_dict(chunks).items() if tensor.isnan().any()}
    assert unset == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}


def _check(draw: Draw, device: torch.device) -> None:
    whole = _drawn(draw, [2, 3], [0, 1], device)
    parts = [_drawn(draw, [1, 3, 1], [index], device) for index in range(3)]
    merged = {name: tensor for part in parts for name, tensor in part.items()}
    assert merged.keys() == whole.keys() != set()
    assert all(
        tensor.device == device and torch.equal(tensor, merged[name]) for name, tensor in whole.items()
    )
    others = _drawn(draw, [2, 3], [0, 1], device, seed=2)
    assert any(not torch.equal(tensor, others[name]) for name, tensor in whole.items())
    random = [tuple(tensor.flatten().tolist()) for name, tensor in whole.items() if "q_proj" in name]
    assert len(set(random)) == len(random) == 5, "each layer has its own numbers"


def _drawn(
    draw: Draw, layers: list[int], indices: list[int], device: torch.device, seed: int = 1
) -> dict[str, torch.Tensor]:
    chunks = hf.split(text_config("llama"), layers).build(indices, device=device, dtype=torch.bfloat16)
    torch.manual_seed(indices[0])  # seeds all devices, differently for each part
    before = _states(device)
    drawn = draw(chunks, seed)
    assert all(map(torch.equal, before, _states(device))), "the job's own random numbers are left alone"
    return drawn


def _states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the CPU's generator and of those of all devices of the kind."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states += [module.get_rng_state(torch.device(device.type, i)) for i in range(module.device_count())]
    return states
