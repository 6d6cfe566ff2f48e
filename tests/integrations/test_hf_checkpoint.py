"""Checkpoints that are damaged or of another model: the error names the file or the tensors and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import text_config, vision_config
from safetensors.torch import save_file

import ldt
from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class

CONFIG = text_config("llama")


def load(folder: Path, indices: tuple[int, ...] = (0, 1, 2)) -> None:
    hf.load_weights(hf.split(CONFIG, [1, 3, 1]).build(indices), folder)


@pytest.mark.parametrize("content", [b"", b"\x10garbage", b"\x08" + bytes(7) + b"no json!"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ldt.LdtError, match=r"model\.safetensors cannot be read as safetensors: .*save the model"
    ):
        load(tmp_path)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    model_class(CONFIG, 1)(CONFIG).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ldt.LdtError, match=r"model-0.*\.safetensors cannot be read as safetensors"):
        load(tmp_path)


def test_a_file_that_lacks_what_the_index_says_is_named(tmp_path: Path) -> None:
    names = model_class(CONFIG, 1)(CONFIG).state_dict()
    index = {"weight_map": dict.fromkeys(names, "other.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ldt.LdtError, match=r"other\.safetensors cannot be read .*model\.embed_tokens"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("{}", "no weight_map"),
        ("[1]", "no weight_map"),
        ('{"weight_map": {"model.norm.weight": 3}}', "another weight_map"),
        ('{"weight_map": ["model.norm.weight"]}', "another weight_map"),
        ('{"weight_map": ', r"no JSON \(Expecting value"),
        ("\udcff", r"no JSON \('utf-8' codec"),
    ],
)
def test_an_index_that_is_none_is_named(content: str, got: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(
        ldt.LdtError, match=rf"{index} is not the index of a checkpoint: expected .*, got {got}"
    ):
        load(tmp_path)


@pytest.mark.parametrize("indices", [(0,), (1,), (2,)])
def test_layers_beyond_the_config_are_named(indices: tuple[int, ...], tmp_path: Path) -> None:
    deeper = text_config("llama", num_hidden_layers=7)
    model_class(deeper, 1)(deeper).save_pretrained(tmp_path)
    with pytest.raises(
        ldt.LdtError, match=r"layers that the config does not have: model\.layers\.[56]\..* and 15 more"
    ):
        load(tmp_path, indices)


def test_blocks_beyond_the_config_are_named(tmp_path: Path) -> None:
    deeper, config = vision_config(), vision_config()
    deeper.vision_config.depth = 5
    model_class(deeper, 2)(deeper).save_pretrained(tmp_path)
    chunks = hf.split(config, [2, 2, 1, 3, 1], laps=2).build([3])
    with pytest.raises(
        ldt.LdtError, match=r"layers that the config does not have: model\.visual\.blocks\.4\."
    ):
        hf.load_weights(chunks, tmp_path)


def test_layers_that_the_class_ignores_may_be_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeper = text_config("llama", num_hidden_layers=6)
    kind: Any = model_class(deeper, 1)
    kind(deeper).save_pretrained(tmp_path)
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.5\."])
    load(tmp_path)


def test_tensors_that_are_of_no_layer_may_be_more(tmp_path: Path) -> None:
    state = model_class(CONFIG, 1)(CONFIG).state_dict()
    state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "other.9.weight": torch.ones(1)}
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    load(tmp_path)
