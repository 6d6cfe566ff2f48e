"""A pipeline of Hugging Face chunks in three processes equals the unsplit model in losses and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hf_images import BATCHES, logits_of, with_positions
from hf_models import (
    Inputs,
    gradients,
    labels_of,
    packed,
    padded,
    text_config,
    tokens,
    unsplit,
    vision_config,
)
from transformers import PreTrainedConfig

import ldt
import ldt.plan
from ldt.integrations import hf
from ldt.testing import RankPool

WORLD_SIZE = 3


def step_as_unsplit(
    config: PreTrainedConfig, layers: Sequence[int], laps: int, microbatches: Sequence[Inputs], **options: Any
) -> int:
    """Run a step of this rank's chunks, and compare it with the whole model. Returns how many gradients were compared.

    ``options`` are those of connect, such as the device.
    """
    torch.set_num_threads(1)
    topology = ldt.Topology([1] * WORLD_SIZE, laps=laps)
    parts = hf.split(config, layers, laps=laps)
    with ldt.connect(topology, **options) as mesh:
        everything = parts.build(range(parts.num_chunks), mesh.device)
        hf.init_weights(everything, seed=2)
        model = unsplit(config, everything, laps, "sdpa").to(mesh.device)
        chunks = parts.build(topology.chunks_of(mesh.stage), mesh.device)
        hf.init_weights(chunks, seed=2)
        plan = ldt.plan.ushape(topology, len(microbatches))
        pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")
        batch = [on_device(inputs, mesh.device) for inputs in microbatches]
        result = pipeline.step(batch if mesh.is_edge else None)
        losses = accumulate(model, batch, vision=laps == 2)
        if mesh.is_edge:
            assert result.losses is not None
            for mine, theirs in zip(result.losses, losses, strict=True):
                refuse_other("loss", mine, theirs)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: grad for name, grad in gradients(chunks).items() if name in expected}
    for name, grad in found.items():
        refuse_other(name, grad, expected[name], shared=config.tie_word_embeddings and "embed_tokens" in name)
    return len(found)


def on_device(inputs: Inputs, device: torch.device) -> tuple[Inputs, torch.Tensor]:
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    return moved, labels_of(moved)


def refuse_other(
    name: str, grad: torch.Tensor | None, expected: torch.Tensor | None, shared: bool = False
) -> None:
    """Compare bit for bit on the CPU, except for a Parameter that two chunks share.

    One backward of the unsplit model sums the gradients of its two uses before it adds them to those of other
    microbatches. In the pipeline these are two backwards, with those of other microbatches in between. On a GPU some
    kernels add in any order; the difference is small relative to the largest element.
    """
    assert (grad is None) == (expected is None), name
    if grad is None or expected is None:
        return
    if grad.is_cuda:
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    elif shared:
        torch.testing.assert_close(grad, expected)
    else:
        assert torch.equal(grad, expected), name


def accumulate(
    model: torch.nn.Module, batch: Sequence[tuple[Inputs, torch.Tensor]], vision: bool
) -> list[torch.Tensor]:
    """Run the microbatches one by one through the unsplit model, which computes positions of images itself."""
    losses, tokens_of_step = [], 0
    for inputs, labels in batch:
        given = {name: value for name, value in inputs.items() if not (vision and name == "position_ids")}
        logits = logits_of(model, given) if vision else model(**given, use_cache=False).logits
        total, count = hf.token_loss(logits, labels)
        total.backward()
        losses.append(total.detach() / count)
        tokens_of_step += int(count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(tokens_of_step)
    return losses


Case = tuple[PreTrainedConfig, list[int], int, list[Inputs]]  # arguments of step_as_unsplit


def ragged(tied: bool) -> Case:
    config = text_config("qwen3", head_dim=8, tie_word_embeddings=tied)
    sizes = ((2, 7), (2, 3), (2, 11), (1, 2))
    return config, [1, 2, 1, 1], 1, [{"input_ids": tokens(*size, seed=size[1])} for size in sizes]


def padded_and_packed(family: str) -> Case:
    """The middle stage gets its masks as metadata: padding on either side, packed texts, or none."""
    microbatches = [
        padded([5, 9, 2], "right"),
        padded([7, 3], "left"),
        packed([3, 5, 2], [4, 1, 5]),
        {"input_ids": tokens(2, 6)},
    ]
    return text_config(family, tie_word_embeddings=False), [1, 2, 1, 1], 1, microbatches


def images() -> Case:
    """Images of all sizes and none, in two laps; the last microbatch is ragged and has no image."""
    config = vision_config(tie_word_embeddings=False)
    return config, [1, 2, 1, 1, 2, 1, 1], 2, [with_positions(config, inputs) for inputs in BATCHES.values()]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ragged_microbatches_without_padding(pool: RankPool, tied: bool) -> None:
    assert all(number > 10 for number in pool.run(step_as_unsplit, *ragged(tied)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padded_and_packed_microbatches(pool: RankPool, family: str) -> None:
    assert all(number >= 9 for number in pool.run(step_as_unsplit, *padded_and_packed(family)))


def test_images_of_all_sizes_and_none_in_two_laps(pool: RankPool) -> None:
    assert all(number > 10 for number in pool.run(step_as_unsplit, *images(), timeout=90))
