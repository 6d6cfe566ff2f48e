"""The fine-tuning recipe at the edge and ``python -m ldt follow`` in the cloud, each in a network namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jsonargparse")
pytest.importorskip("peft")

from launchers import launch
from test_finetune_hf import SCRIPT, data, loss_of, model

from ldt.cli import main

__all__ = ["data", "model"]  # fixtures

JOB = """
script = "{script}"
arguments = ["--model", "model", "--data.path", "sums.jsonl", "--data.validation", "sums.jsonl", "--output", "run",
             "--steps", "{steps}", "--save_every", "4", "--microbatches", "3", "--batch", "9", "--optimizer.lr", "0.01"]

[topology]
tp = [1, 1]

[sites.edge]
address = "10.88.0.1"
interface = "{edge}"
port = 29500

[sites.cloud]
address = "10.88.0.2"
interface = "{cloud}"
command = ["-m", "ldt", "follow", "--model", "model", "--checkpoints", "saves-of-the-cloud"]
"""


def command_of_the_page() -> str:
    """The command of the guide, with the paths of this test."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "finetune.md").read_text()
    command = page.split("```sh\npython -m ldt ")[1].split("```")[0].replace("\\\n", "")
    paths = {"runs/first": "run", "cloud-checkpoints": "CHECKPOINTS_OF_THE_CLOUD", "path/to/model": "model"}
    for path, here in paths.items():
        command = command.replace(path, here)
    return command


@pytest.mark.slow
@pytest.mark.usefixtures("wide_area")
def test_the_cloud_needs_no_script_at_another_site(
    model: Any,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from wan_link import Settings, wide_area_link

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.toml"
    with wide_area_link(Settings(125e6, 10e-3)) as link:
        for steps in (4, 8):  # the second run goes on
            places = dict(zip(("edge", "cloud"), (place.card for place in link.places), strict=True))
            file.write_text(JOB.format(script=SCRIPT, steps=steps, **places))
            with (
                launch(file, "edge", place=link.places[0]) as edge,
                launch(file, "cloud", place=link.places[1]) as cloud,
            ):
                assert [edge.status(), cloud.status()] == [0, 0], edge.text + cloud.text
    assert "goes on from the checkpoint of step 4" in edge.text
    assert "follows the edge" in cloud.text
    (command,) = re.findall(r"to merge: python -m ldt (.*)", edge.text)
    assert command.split() == command_of_the_page().split()
    words = command.replace("CHECKPOINTS_OF_THE_CLOUD", "saves-of-the-cloud").split()
    assert main(words) == 0, capsys.readouterr().err
    (loss,) = re.findall(r"step 8: validation loss ([\d.]+)", edge.text)
    assert loss_of(Path("run/model"), data) == pytest.approx(float(loss), abs=1e-3)
