"""A transformers model saved in three stages is loaded in two, and merged into files that from_pretrained reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hf_models import labels_of, padded, text_config
from safetensors import safe_open
from transformers import PreTrainedConfig

import ldt
from ldt.cli import main
from ldt.integrations import hf
from ldt.integrations.hf.meta_model import model_class
from ldt.testing import RankPool

WORLD_SIZE = 3
State = dict[str, torch.Tensor]


def trained(
    path: Path, config: PreTrainedConfig, tp: Sequence[int], layers: Sequence[int], load: bool
) -> tuple[State, State]:
    """Return this rank's weights and first moments by names of the whole model, after two steps or a load."""
    torch.set_num_threads(1)
    topology = ldt.Topology(tp)
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        chunks = hf.split(config, layers).build(topology.chunks_of(mesh.stage))
        hf.init_weights(chunks, seed=1 if load else 0)
        pipeline = ldt.Pipeline(chunks, mesh, loss_fn=hf.token_loss, loss_reduction="token")
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        folder = path / ("edge" if mesh.is_edge else "cloud")
        if load:
            assert ldt.load_checkpoint([path / "edge", path / "cloud"], pipeline, optimizer) is not None
        else:
            inputs = padded([9, 4, 1], "left")
            for _ in range(2):
                pipeline.step([(inputs, labels_of(inputs))] if mesh.is_edge else None)
                optimizer.step()
            ldt.save_checkpoint(folder, pipeline, optimizer, step=2)
        names = {
            id(p): n for chunk in chunks for n, p in chunk.model.named_parameters(remove_duplicate=False)
        }
        moments = {names[id(p)]: state["exp_avg"] for p, state in optimizer.state.items()}
        return hf.state_dict(chunks), moments


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_in_three_stages_loaded_in_two_and_merged(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    config = text_config("llama", tie_word_embeddings=tied)
    saved = pool.run(trained, tmp_path, config, [1, 1, 1], [1, 2, 1, 1], False)
    loaded = pool.run(trained, tmp_path, config, [1, 1], [2, 2, 1], True, ranks=[0, 1])
    for before, after in ((merge(saved, 0), merge(loaded, 0)), (merge(saved, 1), merge(loaded, 1))):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    paths = [str(tmp_path / name) for name in ("edge", "cloud")]
    assert main(["merge", *paths, str(tmp_path / "model.safetensors")]) == 0
    config.save_pretrained(tmp_path)
    whole = merge(saved, 0)
    model = model_class(config, 1).from_pretrained(tmp_path).state_dict()
    assert model.keys() == whole.keys()
    assert all(torch.equal(model[name], tensor) for name, tensor in whole.items())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 (it is no dict)
    chunks = hf.split(config, [3, 2]).build([0, 1])
    hf.load_weights(chunks, tmp_path)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in hf.state_dict(chunks).items())


def merge(answers: Sequence[tuple[State, State]], which: int) -> State:
    return {name: tensor for answer in answers for name, tensor in answer[which].items()}


def test_a_merge_needs_all_stages(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(trained, tmp_path, text_config("llama"), [1, 1, 1], [1, 2, 1, 1], False)
    assert main(["merge", str(tmp_path / "cloud"), str(tmp_path / "model.safetensors")]) == 2
    assert "give the paths of all stages" in capsys.readouterr().err
    assert not (tmp_path / "model.safetensors").exists()
