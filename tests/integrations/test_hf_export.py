"""A checkpoint of all stages becomes a folder that transformers loads, with adapters merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import text_config, vision_config
from test_hf_build import SETTINGS, TOPOLOGY, batches
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2VLImageProcessor

import ldt
from ldt.cli import main
from ldt.integrations import hf
from ldt.integrations.hf import export
from ldt.integrations.hf.export import _copy_tokenizer
from ldt.testing import RankPool

WORLD_SIZE = 3
ADAPTER = hf.Adapter(rank=4, alpha=4)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    config = text_config("llama", initializer_range=0.2, tie_word_embeddings=request.param)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(found)
    return found


def logits_after_saving(model: str, saves: str, settings: hf.Settings) -> torch.Tensor | None:
    with ldt.connect(TOPOLOGY) as mesh:
        if not mesh.is_edge:
            hf.follow(mesh, model, checkpoints=saves)
            return None
        built = hf.build(mesh, model, settings)
        with ldt.Leader(built.pipeline, built.optimizer) as leader:
            leader.step(batches(0))
            leader.save(saves, step=1)
            leader.train(False)
            outputs = leader.eval(batches(1)[:1]).outputs
            assert outputs is not None
            return outputs[0]


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["weights", "adapters"])
def test_the_folder_is_the_trained_model(
    pool: RankPool, folder: Path, tmp_path: Path, adapter: hf.Adapter | None
) -> None:
    settings = replace(SETTINGS, adapter=adapter, optimizer=hf.Optimizer(lr=0.1))
    (logits, *_) = pool.run(logits_after_saving, str(folder), str(tmp_path / "saves"), settings, timeout=120)
    target = tmp_path / "trained"
    assert hf.save_pretrained(tmp_path / "saves", folder, target, adapter=adapter) == 1
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    inputs = batches(1)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-4, atol=1e-4)
        before = AutoModelForCausalLM.from_pretrained(folder).eval()(**inputs).logits
    assert not torch.allclose(before, logits, atol=1e-2)
    assert (target / "adapter" / "adapter_config.json").exists() == (adapter is not None)


def test_processors_of_images_are_copied(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "trained"
    Qwen2VLImageProcessor(min_pixels=784, max_pixels=1568).save_pretrained(model)
    text_config("llama").save_pretrained(model)
    target.mkdir()
    _copy_tokenizer(model, target)
    found = json.loads((target / "preprocessor_config.json").read_text())
    assert found["size"] == {"shortest_edge": 784, "longest_edge": 1568}


def test_a_folder_is_complete_or_as_it_was(
    pool: RankPool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(logits_after_saving, str(folder), str(tmp_path / "saves"), SETTINGS, timeout=120)
    target = tmp_path / "trained"
    target.mkdir()
    (target / "config.json").write_text("{}")

    def fail(*unused: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(export, "_copy_tokenizer", fail)
    with pytest.raises(OSError, match="the disk is full"):
        hf.save_pretrained(tmp_path / "saves", folder, target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("config.json", "{}")]
    monkeypatch.undo()
    hf.save_pretrained(tmp_path / "saves", folder, target)
    assert AutoModelForCausalLM.from_pretrained(target)


def test_the_command_and_its_refusals(
    pool: RankPool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SETTINGS, adapter=ADAPTER)
    pool.run(logits_after_saving, str(folder), str(tmp_path / "saves"), settings, timeout=120)
    command = ["merge", str(tmp_path / "saves"), str(tmp_path / "trained"), "--model", str(folder)]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "the checkpoint has adapters, got adapter=None" in message
    assert "--settings with the settings.json" in message
    file = tmp_path / "settings.json"
    for rank, status in ((4, 0), (8, 2)):
        other = replace(
            settings, adapter=replace(ADAPTER, rank=rank, targets=["q_proj"] if rank == 8 else "all-linear")
        )
        file.write_text(json.dumps(other.to_json()))
        assert main([*command, "--settings", str(file)]) == status, capsys.readouterr().err
    assert "the checkpoint has other adapters than" in capsys.readouterr().err


def test_a_vision_language_model(tmp_path: Path) -> None:
    config = vision_config()
    config.save_pretrained(tmp_path / "model")
    topology = ldt.Topology([1], laps=2)
    parts = hf.split(config, [4, 2, 3], laps=2)
    chunks = parts.build(range(3))
    hf.init_weights(chunks, 0)
    with ldt.connect(topology) as mesh:
        pipeline = ldt.Pipeline(chunks, mesh, loss_fn=hf.token_loss, loss_reduction="token")
        ldt.save_checkpoint(tmp_path / "saves", pipeline, step=1)
    assert hf.save_pretrained(tmp_path / "saves", tmp_path / "model", tmp_path / "trained") == 1
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    weights = model.state_dict()
    for name, tensor in hf.state_dict(chunks).items():
        assert torch.equal(weights[name], tensor), name


def test_adapters_of_a_config_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ldt.LdtError, match="got its config alone"):
        hf.save_pretrained(tmp_path, tmp_path / "config.json", tmp_path / "out", adapter=hf.Adapter(rank=2))
    assert not (tmp_path / "out").exists()
