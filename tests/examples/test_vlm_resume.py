"""The vision-language example goes on from a checkpoint bit for bit, and writes a model that transformers reads."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import torch

import ldt
from ldt.integrations import hf
from ldt.testing import RankPool

WORLD_SIZE = 2
EXAMPLES = str(Path(__file__).parents[2] / "examples")
TINY = "--device=cpu --steps=4 --save-every=2 --eval-every=3 --microbatches=4 --batch=2 --clip=0.5"


def trained(folder: str, *more: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Train in this rank's process. Returns what it prints and, on the edge, the merged weights."""
    sys.path.insert(0, EXAMPLES)
    import train_vlm
    from transformers import Qwen2_5_VLForConditionalGeneration

    places = [f"--{name}={folder}/{name}" for name in ("checkpoints", "output")]
    options = train_vlm.parse_options([*TINY.split(), *places, *more])
    parts = hf.split(train_vlm.small_config(), train_vlm.layers_of_chunks(WORLD_SIZE), laps=2)
    printed = io.StringIO()
    with ldt.connect(ldt.Topology([1] * WORLD_SIZE, laps=2)) as mesh, contextlib.redirect_stdout(printed):
        train_vlm.run(options, train_vlm.select_device(options.device), parts, mesh)
    if not mesh.is_edge:
        return printed.getvalue(), {}
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(f"{folder}/output")
    return printed.getvalue(), {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_resumed_run_equals_one_that_was_not_stopped(pool: RankPool, tmp_path: Path) -> None:
    log = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    printed, whole = pool.run(trained, str(tmp_path), f"--tensorboard={tmp_path}/log", timeout=200)[0]
    said = [line.split(":")[0] for line in printed.splitlines() if line.startswith("accuracy ")]
    assert said == [f"accuracy {when}" for when in ("before training", "after 3 steps", "after training")]
    events = log.EventAccumulator(f"{tmp_path}/log").Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]

    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "output")
    printed, resumed = pool.run(trained, str(tmp_path), timeout=200)[0]
    assert "2 of 4 steps were done before\n" in printed
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_a_merge_needs_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    from vlm.options import parse_options

    with pytest.raises(SystemExit):
        parse_options(["--output=model"])
    assert "give --checkpoints DIR, too" in capsys.readouterr().err
