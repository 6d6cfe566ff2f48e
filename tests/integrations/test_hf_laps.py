"""Chunks of models with an encoder in two laps, run in order, equal the unsplit model bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_media
import pytest
import torch
from hf_media import FAMILIES, Family, copy_weights, specs_by_values, walk, whole_model
from torch import nn

from ldt.integrations import hf
from ldt.runtime.common.tensor_spec import specs_of
from ldt.runtime.dry_run.shape_inference import infer_specs

# One output of a layer is used twice there. The sum of its gradients is made in another order.
IN_ANOTHER_ORDER = {"qwen3_vl"}


def family_of(kind: str, **changes: Any) -> Family:
    found: Family = getattr(hf_media, kind)(**changes)
    return found


def check(kind: str, family: Family, attention: str | None = None, prepare: Any = None) -> list[hf.Chunk]:
    model = whole_model(family.config, attention)
    chunks = hf.split(family.config, family.layers, laps=2).build(
        range(len(family.layers)), attn_implementation=attention
    )
    copy_weights(chunks, model)
    for module in (model, *chunks) if prepare else ():
        prepare(module)
    half = len(family.layers) // 2
    for inputs in family.microbatches:
        logits, expected = walk(chunks, {0, half, 2 * half}, inputs), model(**inputs, use_cache=False).logits
        assert torch.equal(logits, expected)
        weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
        for some in (logits, expected):
            (some * weights).sum().backward()
    refuse_other_gradients(model, chunks, exact=kind not in IN_ANOTHER_ORDER)
    return chunks


def refuse_other_gradients(model: nn.Module, chunks: list[hf.Chunk], exact: bool) -> None:
    found = {name: p.grad for chunk in chunks for name, p in chunk.model.named_parameters()}
    assert found.keys() >= {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, expected = found[name], parameter.grad
        assert (grad is None) == (expected is None), name
        if grad is not None and expected is not None:
            assert not exact or torch.equal(grad, expected), name
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_laps_equal_the_unsplit_model(kind: str) -> None:
    check(kind, family_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_both_attentions_tied_or_not(kind: str, attention: str, tied: bool) -> None:
    check(kind, family_of(kind, tie_word_embeddings=tied), attention)


def empty_edge(family: Family) -> Family:
    family.layers = [0, 4, 0, 0, 5, 0, 0]
    return family


def one_stage(family: Family) -> Family:
    family.layers = [4, 3, 2]
    return family


@pytest.mark.parametrize("split", [empty_edge, one_stage])
@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_other_splits(kind: str, split: Any) -> None:
    check(kind, split(family_of(kind)))


@pytest.mark.parametrize("layer", [-1, [1, 3], [-2, -4]])
def test_outputs_of_other_layers(layer: Any) -> None:
    check("llava", family_of("llava", vision_feature_layer=layer))


@pytest.mark.parametrize("kind", ["mistral3", "t5"])
def test_activation_checkpointing(kind: str) -> None:
    def enable(module: Any) -> None:
        model = getattr(module, "model", module) if isinstance(module, hf.Chunk) else module
        model.gradient_checkpointing_enable({"use_reentrant": False})

    check(kind, family_of(kind), prepare=enable)


@pytest.mark.parametrize("setting", ["plain", "frozen", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_declared_shapes_are_those_that_come(kind: str, setting: str) -> None:
    family = family_of(kind)
    dtype = torch.bfloat16 if setting == "bfloat16" else None
    chunks: list[Any] = hf.split(family.config, family.layers, laps=2).build(range(7), dtype=dtype)
    for chunk in chunks:
        for parameter in chunk.parameters():
            nn.init.normal_(parameter, std=0.1)
    for chunk in chunks[:3] if setting == "frozen" else []:
        chunk.requires_grad_(False)
    for of_floats in family.microbatches:
        inputs = {n: v.to(dtype) if v.is_floating_point() and dtype else v for n, v in of_floats.items()}
        hop: Any = ()
        for index, chunk in enumerate(chunks[:-1]):
            given = hf_media.inputs_of(chunk, index in (0, 3), inputs)
            if index == 0:
                expected = specs_by_values(chunk, given)
            else:
                expected = infer_specs(index, chunk, specs_of(hop), given, torch.device("cpu"), training=True)
            hop = chunk(*hop, **given)
            assert expected == specs_of(hop), f"chunk {index}"


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0, 3, 1, 1, 2, 1, 1], [1, 2, 1, 0, 3, 1, 1]])
def test_layers_that_compute_biases_for_others_are_on_the_edge(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="must be on the edge: chunks 0 and 3 must have layers"):
        hf.split(family_of("t5").config, layers, laps=2)


def test_features_are_added_before_the_last_chunk() -> None:
    with pytest.raises(ValueError, match="features of images are added behind the first 2 language layers"):
        hf.split(family_of("qwen3_vl").config, [1, 2, 1, 0, 1, 0, 4], laps=2)


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    with pytest.raises(ValueError, match=r"WhisperConfig has encoder_layerdrop=0\.1: set it to 0"):
        hf.split(family_of("whisper", encoder_layerdrop=0.1).config, [1, 2, 1, 1, 2, 1, 1], laps=2)


def test_what_the_first_layer_gets_is_not_known_elsewhere() -> None:
    with pytest.raises(
        ValueError, match=r"\(model type 'llava'\) cannot be run in chunks: it uses what the first"
    ):
        hf.split(family_of("llava", vision_feature_layer=0).config, [1, 2, 1, 1, 2, 1, 1], laps=2)


def test_images_without_positions_are_refused() -> None:
    family = family_of("qwen3_vl")
    (head,) = hf.split(family.config, family.layers, laps=2).build([0])
    without = {name: value for name, value in family.microbatches[0].items() if name != "position_ids"}
    with pytest.raises(ValueError, match=r"needs position_ids among its inputs.*hf\.position_ids"):
        head(**without)


# -- one lap ------------------------------------------------------------------------------------------------------


def test_gemma_3_in_one_lap_has_no_tower() -> None:
    family = family_of("gemma3")
    chunks = hf.split(family.config, [1, 3, 1]).build(range(3))
    assert not any(
        "vision" in name or "projector" in name for c in chunks for name, _ in c.named_parameters()
    )
    model: Any = whole_model(family.config)
    copy_weights(chunks, model)
    inputs = {name: family.microbatches[2][name] for name in ("input_ids", "attention_mask")}
    logits, expected = walk(chunks, {0, 2}, inputs), model(**inputs, use_cache=False).logits
    assert torch.equal(logits, expected)
    for some in (logits, expected):
        some.square().sum().backward()
    for chunk in chunks:
        for name, parameter in chunk.model.named_parameters():
            assert torch.equal(model.get_parameter(name).grad, parameter.grad), name


# -- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llava", "t5"])
def test_a_checkpoint_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    family = family_of(kind, tie_word_embeddings=True)
    model = whole_model(family.config)
    model.save_pretrained(tmp_path)
    chunks = hf.split(tmp_path, family.layers, laps=2).build(range(7))
    hf.load_weights(chunks, tmp_path)
    stored = model.state_dict()
    found = hf.state_dict(chunks)
    assert found.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    ends = {
        id(p) for chunk in chunks for n, p in chunk.named_parameters() if "embed_tokens" in n or "head" in n
    }
    assert len(ends) == 1


def test_random_weights_do_not_depend_on_the_split() -> None:
    family = family_of("idefics3")
    drawn = []
    for layers in (family.layers, [4, 3, 2]):
        chunks = hf.split(family.config, layers, laps=2).build(range(len(layers)))
        hf.init_weights(chunks, seed=0)
        drawn.append(hf.state_dict(chunks))
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(tensor, drawn[1][name]) for name, tensor in drawn[0].items())
