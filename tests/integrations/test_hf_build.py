"""The edge's settings build every rank's part, and the cloud follows without a script: weights of the unsplit model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import labels_of, text_config, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel, get_scheduler

import ldt
from ldt.integrations import hf
from ldt.plan import ushape
from ldt.testing import RankPool

WORLD_SIZE = 3
TOPOLOGY = ldt.Topology([1, 1, 1])
SETTINGS = hf.Settings(
    layers=[1, 2, 1, 1],
    microbatches=2,
    optimizer=hf.Optimizer(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
)
STEPS, WARM_UP = 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp("model")
    model: Any = AutoModelForCausalLM.from_config(text_config("llama", initializer_range=0.2))
    model.save_pretrained(found)
    return found


def batches(step: int) -> list[Any]:
    inputs = [{"input_ids": tokens(2, 8, seed=10 * step + index)} for index in range(2)]
    return [(each, labels_of(each)) for each in inputs]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return get_scheduler("linear", optimizer, WARM_UP, STEPS)


def train_unsplit(model: PreTrainedModel, settings: hf.Settings) -> list[float]:
    """Train the whole model in one process. Returns its losses per token."""
    optimizer = hf.make_optimizer([model], settings.optimizer)
    scheduler, losses = schedule(optimizer), []
    for step in range(STEPS):
        sums = torch.zeros(2, dtype=torch.float64)
        for inputs, labels in batches(step):
            loss, count = hf.token_loss(model(**inputs, use_cache=False).logits, labels)
            loss.backward()
            sums += torch.tensor([loss.item(), count.item()])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(sums[1].float())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(sums[0] / sums[1]))
    return losses


def lead(mesh: ldt.Mesh, model: str, settings: hf.Settings) -> tuple[list[hf.Chunk], list[float]]:
    built = hf.build(mesh, model, settings)
    losses = []
    with ldt.Leader(built.pipeline, built.optimizer, schedule(built.optimizer), built.scaler) as leader:
        for step in range(STEPS):
            losses.append(float(leader.step(batches(step)).loss))
    return built.chunks, losses


def trained(model: str, settings: hf.Settings, saves: str | None) -> tuple[list[float], dict[str, Any]]:
    """Train on this rank. Returns the losses, and the edge's weights by their names in the whole model."""
    torch.set_num_threads(1)
    with ldt.connect(TOPOLOGY) as mesh:
        if not mesh.is_edge:
            hf.follow(mesh, model, checkpoints=saves)
            return [], {}
        chunks, losses = lead(mesh, model, settings)
    return losses, {name: tensor.clone() for name, tensor in hf.state_dict(chunks).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpointing": True, "optimizer": replace(SETTINGS.optimizer, name="sgd", momentum=0.9)},
        {"microbatches": None, "plan": ushape(TOPOLOGY, 2).to_text()},
    ],
    ids=["adamw", "sgd with checkpointing", "a plan"],
)
def test_weights_are_those_of_the_unsplit_model(
    pool: RankPool, folder: Path, changes: dict[str, Any]
) -> None:
    settings = replace(SETTINGS, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = train_unsplit(model, settings)
    (losses, weights), *_ = pool.run(trained, str(folder), settings, None, timeout=120)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(weights) == 9 * 2 + 3
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], msg=name)


def losses_with_seeded_edge(model: str, settings: hf.Settings) -> list[float]:
    if dist.get_rank() == 0:
        torch.manual_seed(0)
    return trained(model, settings, None)[0]


def test_the_seed_of_the_edge_decides_dropout_on_the_cloud(pool: RankPool, folder: Path) -> None:
    settings = replace(SETTINGS, adapter=hf.Adapter(rank=4, dropout=0.5))
    first, second = (
        pool.run(losses_with_seeded_edge, str(folder), settings, timeout=120)[0] for _ in range(2)
    )
    assert first == second


def test_adapters_are_those_of_the_unsplit_model(pool: RankPool, folder: Path) -> None:
    settings = replace(SETTINGS, adapter=hf.Adapter(rank=4, targets=["q_proj", "down_proj"]))
    (losses, weights), *_ = pool.run(trained, str(folder), settings, None, timeout=120)
    parts = hf.split(str(folder), SETTINGS.layers).build(range(4))
    hf.load_weights(parts, folder)
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    hf.add_adapter(parts, lora)
    whole = get_peft_model(model, lora)
    whole.load_state_dict({f"base_model.model.{name}": t for name, t in hf.state_dict(parts).items()})
    assert losses == pytest.approx(train_unsplit(whole, settings), rel=1e-6)
    assert sum("lora_B" in name and bool(tensor.any()) for name, tensor in weights.items()) == 4


def resumed(model: str, settings: hf.Settings, saves: str, first: int, last: int) -> list[float]:
    """Run steps ``first`` to ``last`` on this rank, from the checkpoint of the first to one of the last."""
    torch.set_num_threads(1)
    with ldt.connect(TOPOLOGY) as mesh:
        if not mesh.is_edge:
            hf.follow(mesh, model, checkpoints=saves)
            return []
        built = hf.build(mesh, model, settings)
        with ldt.Leader(built.pipeline, built.optimizer, schedule(built.optimizer), built.scaler) as leader:
            if first > 0:
                leader.load(saves, step=first)
            losses = [float(leader.step(batches(step)).loss) for step in range(first, last)]
            leader.save(saves, step=last)
        return losses


def test_a_run_goes_on_with_another_split(pool: RankPool, folder: Path, tmp_path: Path) -> None:
    """Layers of the edge and of the cloud come into one parameter group, with one learning rate."""
    expected = train_unsplit(AutoModelForCausalLM.from_pretrained(folder), SETTINGS)
    losses = []
    for first, last, layers in ((0, 2, [2, 1, 1, 1]), (2, 3, [1, 2, 2, 0]), (3, STEPS, [2, 1, 1, 1])):
        settings = replace(SETTINGS, layers=layers)
        losses += pool.run(resumed, str(folder), settings, str(tmp_path), first, last, timeout=120)[0]
    assert losses == pytest.approx(expected, rel=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------


def refusal(model: str, of_cloud: str, settings: Any) -> str:
    with ldt.connect(TOPOLOGY) as mesh:
        try:
            if mesh.is_edge:
                hf.build(mesh, model, settings)
            else:
                hf.follow(mesh, of_cloud if mesh.stage == 2 else model)
        except (ldt.LdtError, ValueError, TypeError, OSError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "another config",
            "all ranks must be given equal configs of the model: ranks \\[2\\]|ranks \\[0, 1\\]",
        ),
        ("other weights", "ranks 0 and \\[2\\] have different weights of the model"),
        ("another layer", "ranks 0 and \\[2\\] have different weights of the model"),
        ("only a config", "got a config alone, .*give the folder of both|rank [12] cannot finish hf.build"),
        ("a negative dropout", "dropout must be at least 0 and below 1, got -1.0|rank 0 cannot begin"),
        ("no weight decay", "weight_decay must be at least 0, got -1.0|rank 0 cannot begin"),
        ("targets that are a text", "targets is a text, expected 'all-linear' or a list|rank 0 cannot begin"),
        ("no folder", "nowhere|rank 2 cannot begin hf.build"),
        ("no settings", "hf.build needs hf.Settings on the edge, got NoneType|rank 0 cannot begin"),
        ("other layers", "its chunks have 1 \\+ 1 \\+ 1 \\+ 1|rank [012] cannot finish hf.build"),
        ("too few chunks", "a number for each of the 4 chunks|rank [012] cannot finish hf.build"),
        ("a plan of others", "plan"),
        ("an unknown dtype", "dtype is a text, expected 'float32'|rank 0 cannot begin"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    pool: RankPool, folder: Path, tmp_path: Path, how: str, expected: str
) -> None:
    of_cloud, settings = str(folder), SETTINGS
    if how == "another layer":  # as of a model that adapters were merged into
        other = AutoModelForCausalLM.from_pretrained(folder)
        torch.nn.init.constant_(other.model.layers[2].self_attn.q_proj.weight, 2.0)
        other.save_pretrained(tmp_path / "other")
        of_cloud = str(tmp_path / "other")
    elif how == "only a config":
        of_cloud = str(folder / "config.json")
    elif how in ("another config", "other weights"):
        changes = {"rms_norm_eps": 1e-3} if how == "another config" else {}
        other: Any = AutoModelForCausalLM.from_config(text_config("llama", initializer_range=0.2, **changes))
        torch.nn.init.constant_(other.model.norm.weight, 2.0)
        other.save_pretrained(tmp_path / "other")
        of_cloud = str(tmp_path / "other")
    elif how == "no folder":
        of_cloud = str(tmp_path / "nowhere")
    settings = {
        "no settings": None,
        "other layers": replace(SETTINGS, layers=[1, 1, 1, 1]),
        "too few chunks": replace(SETTINGS, layers=[1, 3, 1]),
        "a plan of others": replace(SETTINGS, plan=ushape(ldt.Topology([1, 1]), 2).to_text()),
        "a negative dropout": replace(SETTINGS, adapter=hf.Adapter(rank=2, dropout=-1.0)),
        "no weight decay": replace(SETTINGS, optimizer=hf.Optimizer(weight_decay=-1.0)),
        "targets that are a text": replace(SETTINGS, adapter=hf.Adapter(rank=2, targets=".*")),  # type: ignore[arg-type]
        "an unknown dtype": replace(SETTINGS, dtype="float8"),  # type: ignore[arg-type]
    }.get(how, settings)
    for text in pool.run(refusal, str(folder), of_cloud, settings, timeout=60):
        assert re.search(expected, text), text


# -- the page ----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "follow.md"


def block(title: str) -> str:
    found: str = PAGE.read_text().split(f'title="{title}"\n')[1].split("```")[0]
    return found


def test_the_settings_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(block("on the edge").split("built =")[0], names)
    settings = names["settings"]
    settings.check()
    assert settings == hf.Settings.from_json(settings.to_json())
    assert (settings.layers, settings.optimizer.lr) == ([1, 14, 14, 1], 2e-4)


def test_the_command_of_a_site_on_the_page(tmp_path: Path) -> None:
    from ldt.cli import build_parser
    from ldt.launch.description import read

    (tmp_path / "job.toml").write_text(
        'script = "train.py"\n[topology]\ntp = [1, 1, 1]\n'
        '[sites.edge]\naddress = "10.0.0.1"\ninterface = "wg0"\nport = 29500\n' + block("in job.toml")
    )
    command = read(tmp_path / "job.toml").command_of("cloud")
    assert command[:2] == ("-m", "ldt")
    assert build_parser().parse_args(command[2:]).model == "path/to/model"


# -- without a script on the cloud -------------------------------------------------------------------------------


EDGE = """
import sys
import torch.distributed as dist
sys.path[:0] = sys.argv[2:]
import test_hf_build as test
import ldt
dist.init_process_group("gloo")
with ldt.connect(test.TOPOLOGY) as mesh:
    print("losses", test.lead(mesh, sys.argv[1], test.SETTINGS)[1])
dist.destroy_process_group()
"""


@pytest.fixture
def environment() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_the_command_needs_no_script(folder: Path, environment: dict[str, str]) -> None:
    follow = ["-m", "ldt", "follow", "--model", str(folder), "--stages", "1,1,1", "--device", "cpu"]
    edge = ["-c", EDGE, str(folder), str(Path(__file__).parent)]
    started = [
        subprocess.Popen(
            [sys.executable, *(edge if rank == 0 else follow)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    losses = [float(loss) for loss in re.findall(r"\d\.\d+", outputs[0].split("losses")[1])]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert losses == pytest.approx(train_unsplit(model, SETTINGS), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, "give --stages under torchrun, such as 1,1,1"),
        (["--stages", "1,1"], {"LDT_JOB": "job.toml"}, "where `python -m ldt launch` starts it, as job.toml"),
        (["--laps", "2"], {"LDT_JOB": "job.toml"}, "where `python -m ldt launch` starts it, as job.toml"),
        (
            ["--stages", "1,1,1"],
            {},
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start it with torchrun",
        ),
        (["--stages", "1,x"], {}, "expected sizes such as 1,2,2, got '1,x'"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], variables: dict[str, str], expected: str, folder: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ldt", "follow", "--model", str(folder), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
