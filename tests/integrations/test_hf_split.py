"""How a model is split: the parts of a chunk, its output specs, and refused models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SIZES, padded, text_config, tokens, unsplit, vision_config, walk
from transformers import AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import LlamaConfig, LlamaModel

from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class
from ldt.runtime.common.tensor_spec import TensorSpec, specs_of
from ldt.runtime.dry_run.shape_inference import infer_specs

CPU = torch.device("cpu")


def names(chunks: Sequence[hf.Chunk]) -> set[str]:
    return {name for chunk in chunks for name, _ in chunk.model.named_parameters()}


# -- what a chunk holds ------------------------------------------------------------------------------------------


def test_chunks_share_out_the_parameters() -> None:
    config = text_config("qwen2")
    parts = hf.split(config, [1, 2, 1, 1])
    held = [names(parts.build([index])) for index in range(4)]
    assert set.union(*held) == {name for name, _ in model_class(config, 1)(config).named_parameters()}
    assert sum(map(len, held)) == len(set.union(*held))
    assert {name.split(".")[2] for name in held[1]} == {"1", "2"}
    assert {"model.norm.weight", "lm_head.weight"} < held[3]


def test_two_laps_put_embeddings_merger_and_head_on_the_edge() -> None:
    parts = hf.split(vision_config(), [1, 2, 1, 1, 2, 1, 1], laps=2)
    held = [names(parts.build([index])) for index in range(7)]
    edge = {0: "visual.patch_embed", 3: "visual.merger", 6: "lm_head"}
    for index, part in edge.items():
        assert [part in str(some) for some in held] == [other == index for other in range(7)]
    assert ["embed_tokens" in str(some) for some in held].index(True) == 3
    assert parts.num_stages == 3
    assert sum(map(len, held)) == len(set.union(*held))


def test_building_a_chunk_makes_no_other_part(monkeypatch: pytest.MonkeyPatch) -> None:
    config = text_config("llama", num_hidden_layers=50, vocab_size=50_000)
    made: list[int] = []
    full_like = torch.full_like

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        made.append(tensor.numel())
        return full_like(tensor, *args, **options)

    parts = hf.split(config, [1, 1, 48])
    monkeypatch.setattr(torch, "full_like", count)
    (chunk,) = parts.build([1])
    memory = sum(p.untyped_storage().nbytes() for p in [*chunk.parameters(), *chunk.buffers()])
    assert sum(made) * 4 == memory < 50_000
    assert not any(p.is_meta for p in [*chunk.parameters(), *chunk.buffers()])


@pytest.mark.parametrize(
    ("config", "layers", "laps"),
    [
        (text_config("qwen3", head_dim=8, tie_word_embeddings=True), [1, 3, 1], 1),
        (vision_config(tie_word_embeddings=True), [2, 2, 1, 3, 1], 2),
    ],
    ids=["one lap", "two laps"],
)
def test_a_tied_embedding_is_one_parameter(config: Any, layers: list[int], laps: int) -> None:
    parts = hf.split(config, layers, laps=laps)
    edge = parts.build(range(0, len(layers), 2))
    embedding, head = edge[-2].model.get_input_embeddings(), edge[-1].model.lm_head
    assert embedding.weight is head.weight
    state = hf.state_dict(edge)
    assert any(name.endswith("embed_tokens.weight") for name in state)
    assert "lm_head.weight" in state
    (tail,) = parts.build([len(layers) - 1])
    assert tail.model.lm_head.weight is tail.model.get_input_embeddings().weight


def test_weights_are_nan_until_they_are_set() -> None:
    (chunk,) = hf.split(text_config("llama"), [1, 3, 1]).build([1])
    assert all(p.isnan().all() for p in chunk.parameters())
    assert not any(b.isnan().any() for b in chunk.buffers())


def test_dtype_is_that_of_the_config_unless_given() -> None:
    parts = hf.split(text_config("llama", dtype="bfloat16"), [1, 3, 1])
    for dtype, expected in ((None, torch.bfloat16), (torch.float16, torch.float16)):
        (chunk,) = parts.build([0], dtype=dtype)
        assert {p.dtype for p in chunk.parameters()} == {expected}
        assert {b.dtype for b in chunk.buffers()} == {torch.float32}


def test_the_config_may_be_a_folder_and_is_left_as_it_is(tmp_path: Path) -> None:
    config = text_config("qwen2")
    config.save_pretrained(tmp_path)
    before = config.to_dict()
    chunks = [
        parts.build([1], attn_implementation="eager")
        for parts in (hf.split(config, [1, 3, 1]), hf.split(tmp_path, [1, 3, 1]))
    ]
    assert names(chunks[0]) == names(chunks[1])
    assert config.to_dict() == before


def test_checkpointing_of_transformers_works_in_a_chunk() -> None:
    (chunk,) = hf.split(text_config("llama"), [1, 3, 1]).build([1])
    hf.init_weights([chunk], seed=0)
    hidden = torch.randn(2, 4, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(chunk(hidden).square().sum(), hidden)
    enable = getattr(
        chunk.model, "activation_checkpointing_enable", chunk.model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    (again,) = torch.autograd.grad(chunk(hidden).square().sum(), hidden)
    assert torch.equal(plain, again)


# -- shapes of hops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "on fake tensors"])
def test_shapes_are_those_that_come(frozen: bool, dtype: torch.dtype, autocast: bool, declared: bool) -> None:
    chunks = hf.split(text_config("qwen3", head_dim=8), [1, 2, 1, 1]).build(range(4), dtype=dtype)
    hf.init_weights(chunks, seed=0)
    chunks[0].requires_grad_(not frozen)
    inputs = padded([9, 4, 1], "left")
    hop: list[Any] = []
    given = dict(inputs)
    with torch.autocast("cpu", enabled=autocast):
        for index, chunk in enumerate(chunks):
            if not declared:
                chunk.output_spec = None  # type: ignore[assignment,method-assign]
            expected = infer_specs(index, chunk, specs_of(hop), given, CPU, training=True)
            hop = [chunk(*hop, **given)]
            assert expected == specs_of(hop)
            given.pop("input_ids", None)


def test_packed_rows_run_on_fake_tensors() -> None:
    (chunk,) = hf.split(text_config("llama"), [1, 3, 1]).build([1])
    chunk.output_spec = None  # type: ignore[assignment,method-assign]
    positions = {"position_ids": hf.packed_position_ids(torch.tensor([[0, 0, 1, 1]]))}
    hidden = TensorSpec((1, 4, 32), torch.float32, requires_grad=True)
    assert infer_specs(1, chunk, [hidden], positions, CPU, training=True) == (hidden,)


def test_a_frozen_embedding_sends_no_gradient_back() -> None:
    (head,) = hf.split(text_config("llama"), [0, 5]).build([0])
    hf.init_weights([head], seed=0)
    head.requires_grad_(False)
    ids = tokens(2, 3)
    assert (
        head.output_spec(input_ids=ids) == TensorSpec.of(head(ids)) == TensorSpec((2, 3, 32), torch.float32)
    )


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "laps", "message"),
    [
        ([1, 2, 1], 1, r"the model has 5 language layers, but its chunks have 1 \+ 2 \+ 1 = 4"),
        ([1, 5, -1], 1, r"has 5 language layers, but its chunks have 1 \+ 5 \+ -1 = 5"),
        ([5], 1, r"one number per chunk, laps \* P \+ 1 = 1 \* P \+ 1 .* got 1: \[5\]"),
        ([2, 2, 5, 0], 2, r"one number per chunk, laps \* P \+ 1 = 2 \* P \+ 1 .* got 4"),
        ([1, 2, 2, 2, 1], 2, r"the model has 4 blocks of the vision tower, but its chunks have 1 \+ 2 = 3"),
        ([2, 2, 2, 2, 2], 2, r"the model has 5 language layers, but its chunks have 2 \+ 2 \+ 2 = 6"),
        ([1, 4], 3, "1 lap, or 2 with a vision tower; got laps=3"),
    ],
)
def test_wrong_numbers_of_layers_are_refused(layers: list[int], laps: int, message: str) -> None:
    config = vision_config() if laps == 2 else text_config("llama")
    with pytest.raises(ValueError, match=message):
        hf.split(config, layers, laps=laps)


def test_the_wrong_number_of_laps_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"laps=1 needs the config of a causal.*'qwen2_5_vl'\); it has one for laps=2"
    ):
        hf.split(vision_config(), [4, 5])
    with pytest.raises(
        ValueError, match=r"laps=2 needs the config of a vision.*'llama'\); it has one for laps=1"
    ):
        hf.split(text_config("llama"), [1, 3, 1], laps=2)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("granite", {"embedding_multiplier": 12.0}, "changes hidden states outside of its layers"),
        ("gpt2", {}, "no attribute 'model'"),
        ("bloom", {}, "no attribute 'model'"),
    ],
)
def test_models_that_cannot_be_run_in_parts_are_refused(
    family: str, changes: dict[str, Any], why: str
) -> None:
    sizes = SIZES if family == "granite" else {}
    with pytest.raises(ValueError, match=rf"\(model type '{family}'\) cannot be run in chunks: .*{why}"):
        hf.split(AutoConfig.for_model(family, **sizes, **changes), [1, 3, 1])


def test_a_chunk_that_is_not_there_is_named() -> None:
    parts = hf.split(LlamaConfig(**SIZES), [1, 3, 1])
    with pytest.raises(IndexError, match=r"chunks 0\.\.2, there is no 3"):
        parts.build([0, 3])


@pytest.mark.parametrize("layers", [[2.5, 2.5], [2, 3.0], ["2", "3"], 5, [2, None]])
def test_numbers_of_layers_are_whole(layers: Any) -> None:
    with pytest.raises(ValueError, match="layers must be whole numbers, such as"):
        hf.split(text_config("llama"), layers)


@pytest.mark.parametrize("chunks", [1, [1.0], ["1"]])
def test_numbers_of_chunks_are_whole(chunks: Any) -> None:
    with pytest.raises(ValueError, match="chunks must be whole numbers, such as"):
        hf.split(text_config("llama"), [2, 3]).build(chunks)


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_more_outputs_than_chunks_have_are_refused(flag: str) -> None:
    config = text_config("mixtral", **{flag: True})
    with pytest.raises(
        ValueError, match=f"MixtralConfig has {flag}=True, but chunks return only hidden states"
    ):
        hf.split(config, [1, 3, 1])


def test_models_without_named_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="LlamaConfig has return_dict=False"):
        hf.split(text_config("llama", return_dict=False), [1, 3, 1])


@pytest.mark.parametrize("changes", [{"use_cache": True}, {"num_labels": 7}, {"problem_type": "regression"}])
def test_settings_that_chunks_do_without(changes: dict[str, Any]) -> None:
    assert equal_to_the_whole(text_config("llama", **changes))


# -- families of models ------------------------------------------------------------------------------------------

EQUAL = [
    "llama",
    "qwen2",
    "qwen3",
    "smollm3",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "olmo",
    "olmo2",
    "granite",
]
REFUSED = {
    "nanochat": "it runs the final norm 2 times, expected once",
    "granite": "changes hidden states outside of its layers",
    "gpt2": "no attribute 'model'",
    "opt": "",
}


def equal_to_the_whole(config: Any) -> bool:
    parts = hf.split(config, [1, config.num_hidden_layers - 2, 1])
    chunks = parts.build(range(3), attn_implementation="eager")
    hf.init_weights(chunks, seed=0)
    model = unsplit(config, chunks, 1, "eager").eval()
    inputs = {"input_ids": tokens(2, 5)}
    with torch.no_grad():
        whole = model(**inputs, use_cache=False)[0]
        return torch.equal(whole, walk([chunk.eval() for chunk in chunks], {0, 2}, inputs))


@pytest.mark.parametrize("family", EQUAL)
def test_a_family_equals_the_whole_model(family: str) -> None:
    assert equal_to_the_whole(text_config(family))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_name(family: str) -> None:
    sizes = {} if family in ("gpt2", "opt") else SIZES | {"embedding_multiplier": 12.0}
    with pytest.raises(
        ValueError, match=rf"\(model type '{family}'\) cannot be run in chunks: .*{REFUSED[family]}"
    ):
        hf.split(AutoConfig.for_model(family, **sizes), [1, 3, 1])


def twice(self: Any, hidden: Any, layers: Any) -> Any:
    for layer in (layers[0], *layers):
        hidden = layer(hidden)
    return hidden


def backwards(self: Any, hidden: Any, layers: Any) -> Any:
    for layer in reversed(layers):
        hidden = layer(hidden)
    return hidden


def one_left_out(self: Any, hidden: Any, layers: Any) -> Any:
    for layer in layers[1:]:
        hidden = layer(hidden)
    return hidden


def a_skip(self: Any, hidden: Any, layers: Any) -> Any:
    first = hidden
    for layer in layers:
        hidden = layer((hidden + first) / 2)  # zero if all layers are removed
    return hidden


def all_in_the_end(self: Any, hidden: Any, layers: Any) -> Any:
    found = [hidden := layer(hidden) for layer in layers]
    return sum(found) / len(found)


def something_beside(self: Any, hidden: Any, layers: Any) -> Any:
    first = hidden
    for layer in layers:
        hidden = layer(hidden, value=first)
    return hidden


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (twice, "it runs layer 0 2 times, expected once"),
        (backwards, "it runs layer 4 where layer 0 was expected"),
        (one_left_out, "it runs layer 0 0 times, expected once"),
        (a_skip, "what layer 1 gets is not what layer 0 returns"),
        (all_in_the_end, "what the final norm gets is not what layer 4 returns"),
        (something_beside, "layer 0 gets more of the tokens or of other parts than hidden states"),
    ],
)
def test_another_walk_through_the_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch, loop: Any, sentence: str
) -> None:
    """Each loop is the identity if all layers are removed."""

    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=self.norm(loop(self, hidden, self.layers)))

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(ValueError, match=sentence):
        hf.split(text_config("llama"), [1, 3, 1])
