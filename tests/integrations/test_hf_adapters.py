"""LoRA adapters of peft in chunks equal those in the unsplit model, and chunks stay chunks."""

from __future__ import annotations

import inspect

import pytest
import torch
from hf_models import gradients, labels_of, padded, text_config, unsplit, vision_config, walk

from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(targets: list[str] | str | None = None) -> object:
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets or TARGETS, init_lora_weights=False)


def test_adapters_in_chunks_equal_those_in_the_unsplit_model() -> None:
    config = text_config("qwen3", head_dim=8, tie_word_embeddings=True)
    chunks = hf.split(config, [1, 2, 1, 1]).build(range(4))
    hf.init_weights(chunks, seed=0)
    model = peft.get_peft_model(unsplit(config, chunks, 1, "sdpa"), lora())
    hf.add_adapter(chunks, lora())
    weights = {k: v for chunk in chunks for k, v in peft.get_peft_model_state_dict(chunk.model).items()}
    expected = peft.get_peft_model_state_dict(model)
    assert {f"base_model.model.{name}" for name in weights} == expected.keys()
    loaded = peft.set_peft_model_state_dict(model, {f"base_model.model.{k}": v for k, v in weights.items()})
    assert not loaded.unexpected_keys

    inputs = padded([9, 4, 1], "left")
    logits, expected_logits = walk(chunks, {0, 3}, inputs), model(**inputs, use_cache=False).logits
    assert torch.equal(logits, expected_logits)
    for some in (logits, expected_logits):
        total, count = hf.token_loss(some, labels_of(inputs))
        (total / count).backward()
    found = {name: grad for name, grad in gradients(chunks).items() if grad is not None}
    others = {
        n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    assert found.keys() == others.keys() != set()
    assert all(torch.equal(grad, others[name]) for name, grad in found.items())


def test_a_chunk_keeps_its_signature_and_its_spec() -> None:
    parts = hf.split(vision_config(), [1, 2, 1, 1, 2, 1, 1], laps=2)
    chunks = parts.build(range(7))
    before = [inspect.signature(chunk.forward) for chunk in chunks]
    hf.add_adapter(chunks, lora())
    assert [inspect.signature(chunk.forward) for chunk in chunks] == before
    trained = {name for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("targets", ["all-linear", None, r".*\.q_proj"])
def test_targets_may_be_said_in_every_way(targets: str | None) -> None:
    config = text_config("llama")
    model = peft.get_peft_model(model_class(config, 1)(config), peft.LoraConfig(target_modules=targets))
    expected = {
        name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad
    }
    chunks = hf.split(config, [1, 2, 1, 1]).build(range(4))
    hf.add_adapter(chunks, peft.LoraConfig(target_modules=targets))
    found = {name for chunk in chunks for name, p in chunk.model.named_parameters() if p.requires_grad}
    assert found == expected != set()


def test_chunks_without_targets_are_frozen() -> None:
    chunks = hf.split(vision_config(), [1, 2, 1, 0, 2, 1, 2], laps=2).build(range(7))
    hf.add_adapter(chunks, lora(["k_proj"]))
    trains = [any(p.requires_grad for p in chunk.parameters()) for chunk in chunks]
    assert trains == [False, False, False, False, True, True, True]


def test_targets_that_no_chunk_has_are_refused() -> None:
    chunks = hf.split(text_config("llama"), [1, 3, 1]).build([1])
    with pytest.raises(ValueError, match="no_such"):
        hf.add_adapter(chunks, lora(["no_such"]))


def test_an_edge_without_layers_is_only_frozen() -> None:
    chunks = hf.split(text_config("llama"), [0, 5, 0]).build([0, 2])
    hf.add_adapter(chunks, lora())
    assert not any(p.requires_grad for chunk in chunks for p in chunk.parameters())


def test_the_tail_takes_an_adapter_on_the_head() -> None:
    config = text_config("llama")
    chunks = hf.split(config, [2, 3]).build(range(2))
    hf.init_weights(chunks, seed=0)
    plain = walk(chunks, {0, 1}, padded([3, 2], "right"))
    hf.add_adapter(chunks, lora(["lm_head"]))
    assert not torch.equal(plain, walk(chunks, {0, 1}, padded([3, 2], "right")))


@pytest.mark.parametrize("kind", ["LoRA", "gaussian LoRA", "LoHa"])
def test_random_adapters_do_not_depend_on_the_split_and_differ(kind: str) -> None:
    def drawn(
        layers: list[int], indices: list[int], seed: int = 1, name: str = "default"
    ) -> dict[str, torch.Tensor]:
        make = {
            "LoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS),
            "gaussian LoRA": lambda: peft.LoraConfig(
                r=2, target_modules=TARGETS, init_lora_weights="gaussian"
            ),
            "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
        }[kind]
        chunks = hf.split(text_config("llama"), layers).build(indices)
        torch.manual_seed(0)  # as in a job that seeds all stages alike
        before = torch.get_rng_state()
        hf.add_adapter(chunks, make(), name, seed=seed)
        assert torch.equal(before, torch.get_rng_state()), "the job's own random numbers are left alone"
        return {n: p for chunk in chunks for n, p in chunk.model.named_parameters() if p.requires_grad}

    whole = drawn([2, 3], [0, 1])
    parts = [drawn([1, 3, 1], [index]) for index in range(3)]
    alone = {name: tensor for part in parts for name, tensor in part.items()}
    assert alone.keys() == whole.keys() != set()
    assert all(torch.equal(alone[name], tensor) for name, tensor in whole.items())
    random = [tensor for name, tensor in whole.items() if "q_proj" in name and tensor.any()]
    assert len(random) >= 5
    assert len({tuple(tensor.flatten().tolist()) for tensor in random}) == len(random)
    others = [drawn([2, 3], [0, 1], seed=2), drawn([2, 3], [0, 1], name="other")]
    for other in others:
        assert not any(
            torch.equal(a, b) for a, b in zip(whole.values(), other.values(), strict=True) if a.any()
        )


def test_adapters_that_are_not_of_modules_are_refused() -> None:
    chunks = hf.split(text_config("llama"), [2, 3]).build([0])
    for config in (peft.PromptTuningConfig(num_virtual_tokens=2), peft.VeraConfig(target_modules=TARGETS)):
        with pytest.raises(
            ValueError, match=r"Config does not put an adapter of its own .* such as LoraConfig"
        ):
            hf.add_adapter(chunks, config)
