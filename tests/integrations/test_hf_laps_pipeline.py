"""Models with an encoder in two laps over three processes equal the unsplit model in losses and gradients."""

from __future__ import annotations

from typing import Any

import hf_media
import pytest
import torch
from hf_media import copy_weights, whole_model

import ldt
import ldt.plan
from ldt.integrations import hf
from ldt.testing import RankPool

WORLD_SIZE = 3


def weighted(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss of all logits; ``target`` has one number for each."""
    return (output * target).mean()


def step_as_unsplit(kind: str, close: bool = False, **changes: Any) -> int:
    """Run a step of this rank's chunks beside the whole model. Returns how many gradients were compared."""
    torch.set_num_threads(1)
    family = getattr(hf_media, kind)(**changes)
    topology = ldt.Topology([1] * WORLD_SIZE, laps=2)
    model = whole_model(family.config)
    with ldt.connect(topology) as mesh:
        chunks = hf.split(family.config, family.layers, laps=2).build(topology.chunks_of(mesh.stage))
        copy_weights(chunks, model)
        pipeline = ldt.Pipeline(chunks, mesh, loss_fn=weighted)
        batch, losses = [], []
        for inputs in family.microbatches:
            logits = model(**inputs, use_cache=False).logits
            target = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
            losses.append(weighted(logits, target))
            batch.append((inputs, target))
        (sum(losses) / len(losses)).backward()
        result = pipeline.step(batch if mesh.is_edge else None)
        outputs = pipeline.eval(batch if mesh.is_edge else None).outputs
        if mesh.is_edge:
            assert result.losses is not None
            assert outputs is not None
            assert [float(loss) for loss in result.losses] == [float(loss.detach()) for loss in losses]
    compared = 0
    for chunk in chunks:
        for name, parameter in chunk.model.named_parameters():
            expected, grad = model.get_parameter(name).grad, parameter.grad
            assert (grad is None) == (expected is None), name
            if grad is not None and expected is not None:
                torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")
                compared += 1
    return compared


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "gemma3", "mistral3", "t5", "whisper"])
def test_a_step_equals_the_unsplit_model(pool: RankPool, kind: str) -> None:
    assert all(number > 5 for number in pool.run(step_as_unsplit, kind, timeout=90))
