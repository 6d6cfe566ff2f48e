"""Chunks read only their own weights, under the right names; random weights do not depend on the split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_draws import check_nan
from hf_models import text_config, tokens, vision_config, walk
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

import ldt
from ldt.integrations import hf
from ldt.integrations.hf import checkpoint
from ldt.integrations.hf.meta_model import model_class


class Counted:
    """A safe_open that records the requested files and tensors."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.tensors: list[str] = []

    def __call__(self, path: str, **options: Any) -> Any:
        counted, file = self, safe_open(path, **options)

        class Opened:
            def __enter__(self) -> Opened:
                file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                file.__exit__(*error)

            def keys(self) -> list[str]:
                return list(file.keys())

            def get_tensor(self, name: str) -> torch.Tensor:
                counted.files.add(Path(path).name)
                counted.tensors.append(name)
                return file.get_tensor(name)

        return Opened()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counter = Counted()
    monkeypatch.setattr(checkpoint, "safe_open", counter)
    return counter


def saved(config: PreTrainedConfig, folder: Path, laps: int, shard: str = "1GB") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = model_class(config, laps)(config)
    model.save_pretrained(folder, max_shard_size=shard)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


CASES = {
    "untied": (text_config("qwen3", head_dim=8), [1, 2, 1, 1], 1),
    "tied": (text_config("llama", tie_word_embeddings=True), [1, 2, 1, 1], 1),
    "two laps": (vision_config(), [1, 2, 1, 1, 2, 1, 1], 2),
    "two laps, tied": (vision_config(tie_word_embeddings=True), [1, 2, 1, 1, 2, 1, 1], 2),
}


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_a_chunk_reads_its_own_tensors_once(case: str, shard: str, tmp_path: Path, counted: Counted) -> None:
    config, layers, laps = CASES[case]
    expected = saved(config, tmp_path, laps, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    parts = hf.split(tmp_path, layers, laps=laps)
    seen: dict[str, torch.Tensor] = {}
    for index in range(parts.num_chunks):
        counted.tensors.clear()
        chunks = parts.build([index], dtype=torch.float32)
        hf.load_weights(chunks, tmp_path)
        assert len(counted.tensors) == len(set(counted.tensors)) == len(list(chunks[0].parameters()))
        seen |= hf.state_dict(chunks)
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in expected.items())


def test_only_files_that_are_needed_are_opened(tmp_path: Path, counted: Counted) -> None:
    config, layers, laps = CASES["untied"]
    saved(config, tmp_path, laps, "20KB")
    hf.load_weights(hf.split(config, layers).build([1]), tmp_path)
    assert 0 < len(counted.files) < len(list(tmp_path.glob("*.safetensors")))


def test_weights_are_converted(tmp_path: Path) -> None:
    config, layers, laps = CASES["untied"]
    expected = saved(config, tmp_path, laps)
    chunks = hf.split(config, layers).build([1], dtype=torch.bfloat16)
    hf.load_weights(chunks, tmp_path)
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in hf.state_dict(chunks).items())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    config, layers, _ = CASES["untied"]
    saved(text_config("qwen3", head_dim=8, num_hidden_layers=3), tmp_path, 1)
    with pytest.raises(ldt.LdtError, match=r"lacks weights.*model\.layers\.3\..* and 8 more"):
        hf.load_weights(hf.split(config, layers).build([2]), tmp_path)


def test_another_shape_is_named(tmp_path: Path) -> None:
    config, layers, _ = CASES["untied"]
    saved(text_config("qwen3", head_dim=8, intermediate_size=40), tmp_path, 1)
    with pytest.raises(
        ldt.LdtError, match=r"gate_proj\.weight has shape \[40, 32\] in model\.safetensors, but \[48"
    ):
        hf.load_weights(hf.split(config, layers).build([1]), tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    config, layers, _ = CASES["untied"]
    with pytest.raises(
        ldt.LdtError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        hf.load_weights(hf.split(config, layers).build([1]), tmp_path)


def test_without_memory_there_is_nothing_to_load_into(tmp_path: Path) -> None:
    config, layers, _ = CASES["untied"]
    saved(config, tmp_path, 1)
    chunks = hf.split(config, layers).build([0], device="meta")
    with pytest.raises(ldt.LdtError, match="no memory to load"):
        hf.load_weights(chunks, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_random_weights_do_not_depend_on_the_split(case: str) -> None:
    config, layers, laps = CASES[case]
    other = [sum(layers), 0] if laps == 1 else [4, 5, 0]
    together = hf.split(config, other, laps=laps)
    whole = together.build(range(together.num_chunks))
    hf.init_weights(whole, seed=3)
    parts = hf.split(config, layers, laps=laps)
    alone = [drawn(parts, [index], 3) for index in range(parts.num_chunks)]
    merged = {name: tensor for state in alone for name, tensor in state.items()}
    assert_equal_states(merged, hf.state_dict(whole))
    assert any(not torch.equal(tensor, alone[1][name]) for name, tensor in drawn(parts, [1], 4).items())


def drawn(parts: hf.Split, indices: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(indices[0])
    before = torch.get_rng_state()
    chunks = parts.build(indices)
    hf.init_weights(chunks, seed)
    assert torch.equal(before, torch.get_rng_state()), "the job's own random numbers are left alone"
    return hf.state_dict(chunks)


def assert_equal_states(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], other) for name, other in others.items())


def test_weights_that_nothing_draws_are_named() -> None:
    check_nan(torch.device("cpu"))


def test_without_memory_there_is_nothing_to_draw_in() -> None:
    chunks = hf.split(text_config("llama"), [2, 3]).build([0], device="meta")
    with pytest.raises(ldt.LdtError, match=r"no memory to draw model\.embed_tokens in"):
        hf.init_weights(chunks, seed=0)


def test_weights_with_marks_of_transformers_are_drawn_in_their_memory() -> None:
    chunks = hf.split(text_config("llama"), [2, 3]).build([1])
    weights = list(chunks[0].parameters())
    for weight in weights:
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
    places = [weight.data_ptr() for weight in weights]
    hf.init_weights(chunks, seed=0)
    assert all(after is weight for after, weight in zip(chunks[0].parameters(), weights, strict=True))
    assert [weight.data_ptr() for weight in weights] == places


def test_random_weights_are_as_transformers_draws_them() -> None:
    config = text_config("llama", hidden_size=64, initializer_range=0.5)
    state = drawn(hf.split(config, [2, 3]), [0, 1], 0)
    assert float(state["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.5, rel=0.1)
    assert state["model.embed_tokens.weight"][config.pad_token_id].eq(0).all()
    assert state["model.norm.weight"].eq(1).all()


def test_merged_chunks_are_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    config, layers, laps = CASES["two laps, tied"]
    chunks = hf.split(config, layers, laps=laps).build(range(len(layers)))
    hf.init_weights(chunks, seed=0)
    model = model_class(config, laps)(config)
    model.load_state_dict(hf.state_dict(chunks))
    model.save_pretrained(tmp_path)
    again = hf.split(config, layers, laps=laps).build(range(len(layers)))
    hf.load_weights(again, tmp_path)
    assert_equal_states(hf.state_dict(again), hf.state_dict(chunks))


MIXTURE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MIXTURE |= {"moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
MIXTURE |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def test_buffers_come_from_the_file_and_begin_as_those_of_the_model(tmp_path: Path) -> None:
    """A router's bias is a buffer; in a mixture of experts it decides which experts run."""
    config = text_config("deepseek_v3", **MIXTURE)
    torch.manual_seed(0)
    model = model_class(config, 1)(config).eval()
    chunks = hf.split(config, [2, 2, 1]).build(range(3))
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    for name, tensor in hf.state_dict(chunks).items():
        assert torch.equal(tensor, biases[name]) if name in biases else tensor.isnan().all(), name
    for buffer in biases.values():
        buffer.normal_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    hf.load_weights(chunks, tmp_path)
    inputs = {"input_ids": tokens(2, 9)}
    with torch.no_grad():
        whole = model(**inputs, use_cache=False)[0]
        assert torch.equal(whole, walk([chunk.eval() for chunk in chunks], {0, 2}, inputs))
