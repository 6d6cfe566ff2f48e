"""The fine-tuning recipe as users start it: weights and adapters, resumed, merged, and loaded by transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("jsonargparse")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "finetune_hf.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}"
    "{% if m['role'] == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a} + {b} =", "answer": f" {a + b}"} for a in range(7) for b in range(7)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Save a small Llama with random weights in ``tmp_path / "model"``, with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["</s>", "?", "+", "=", "user:", "assistant:", *map(str, range(13))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        tie_word_embeddings=True, initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.save_pretrained(tmp_path / "model")
    return made


def run(*arguments: object, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sizes = ["--device=cpu", "--steps=8", "--microbatches=3", "--batch=9", "--optimizer.lr=0.01"]
    return subprocess.run(
        [*launcher, SCRIPT, *sizes, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def validation_losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", done.stdout + done.stderr)]


def loss_of(folder: Path, data: Path) -> float:
    """The loss per token of the answers in ``data`` of a model that transformers loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses = []
    for line in data.read_text().splitlines():
        sample = json.loads(line)
        prompt, answer = (tokenizer(sample[key])["input_ids"] for key in ("prompt", "answer"))
        labels = [*[-100] * len(prompt), *answer, tokenizer.eos_token_id]
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses.append(float(model(ids, labels=torch.tensor([labels])).loss))
    return sum(losses) / len(losses)  # each answer has two tokens


def test_a_run_that_is_resumed_and_merged(model: Any, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    common = [
        "--model",
        tmp_path / "model",
        "--data.path",
        data,
        "--data.validation",
        data,
        "--output",
        output,
    ]
    common += ["--validate_every=4", "--save_every=4", "--report_every=3", "--tensorboard=true"]
    common += ["--prompts", '["1 + 1 ="]', "--generate=3"]
    first = run(*common, "--merge=false", "--schedule=constant", ranks=2)
    again = run(*common, "--steps=12", "--schedule=constant", ranks=2)
    losses = validation_losses(first) + validation_losses(again)
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] < 6
    assert "goes on from the checkpoint of step 8" in again.stdout
    assert "step 12: 1 + 1 =|" in again.stdout + again.stderr
    assert loss_of(output / "model", data) == pytest.approx(losses[2], abs=1e-3)
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    assert {"lr", "grad_norm", "validation_loss", "tokens_per_second", "step/bubble"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.slow
def test_adapters_on_packed_chats_of_a_file(model: Any, data: Path, tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    pairs = [json.loads(line) for line in data.read_text().splitlines()]
    chats = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["answer"].strip()},
            ]
        }
        for pair in pairs
    ]
    file, output = tmp_path / "chats.jsonl", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, chats)))
    recipe = ["--config", EXAMPLES / "sft" / "lora.toml", "--model", tmp_path / "model", "--output", output]
    recipe += ["--data.path", file, "--data.longest=40", "--data.validation", file, "--weights=float32"]
    before, after = validation_losses(run(*recipe, "--validate_every=1", "--batch=2"))[::7]
    assert after < before
    merged = AutoModelForCausalLM.from_pretrained(output / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    beside = peft.PeftModel.from_pretrained(base, output / "model" / "adapter")
    inputs = {"input_ids": torch.arange(2, 12)[None]}
    difference = (merged(**inputs).logits - beside(**inputs).logits).detach().abs().max()
    assert float(difference) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--weights=bfloat16", "--checkpointing=true"],
        ["--autocast=float16", "--optimizer.name=sgd"],
        ["--adapter.rank=4", "--adapter.four_bit=true", "--weights=bfloat16"],
        ["--compile=true"],
    ],
    ids=" ".join,
)
def test_ways_to_compute(model: Any, data: Path, tmp_path: Path, options: list[str]) -> None:
    if "--adapter.four_bit=true" in options:
        pytest.importorskip("bitsandbytes")
    common = ["--model", tmp_path / "model", "--data.path", data, "--data.validation", data]
    losses = validation_losses(run(*common, *options, "--validate_every=2"))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"adapter": {"rank": 4, "alpha": 64}},
            "has checkpoints of adapter .*'scaling': 2.0.*'scaling': 16.0",
        ),
        ({"adapter": None}, "has checkpoints of adapter .*, got None: give the same, or another --output"),
        ({"optimizer": {"name": "sgd"}}, "has checkpoints of optimizer adamw, got sgd"),
        ({"resume": False}, "has checkpoints of another run: give another --output, or --resume=true"),
        ({"adapter": {"rank": 4, "dropout": 0.5}, "microbatches": 2}, None),
    ],
)
def test_checkpoints_of_other_settings_are_refused(
    changes: dict[str, Any], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import finetune_hf
    from sft.options import Data, Options

    from ldt.integrations import hf

    def keep(**changes: Any) -> None:
        changes["adapter"] = changes["adapter"] and hf.Adapter(**changes["adapter"])
        changes["optimizer"] = hf.Optimizer(**changes.get("optimizer", {}))
        options = Options(model="m", data=Data(path="d"), output=tmp_path, **changes)
        settings = hf.Settings([1, 1, 1], adapter=options.adapter, optimizer=options.optimizer)
        finetune_hf.keep_settings(settings, options, tmp_path / "settings.json", tmp_path / "checkpoints")

    first = {"adapter": {"rank": 4}}
    keep(**first)
    keep(**first, resume=False)  # there is no checkpoint yet
    (tmp_path / "checkpoints" / "step-8").mkdir(parents=True)
    written = (tmp_path / "settings.json").read_text()
    if expected is None:
        keep(**{**first, **changes})
        return
    with pytest.raises(ValueError, match=expected):
        keep(**{**first, **changes})
    assert (tmp_path / "settings.json").read_text() == written


@pytest.mark.slow
def test_a_config_alone_gives_random_weights_and_bytes(model: Any, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    common = ["--model", config, "--data.path", data, "--data.validation", data, "--validate_every=4"]
    first, last = validation_losses(run(*common, "--layers", "[1,2,1]", ranks=2))
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "layers", "sentence"),
    [
        ('{"prompt": "1 + 1 ="}', "[2,1,1]", r'line 1: expected {"prompt": "...", "answer": "..."}'),
        ("", "[2,1,1]", r"wrong.jsonl has no samples: expected lines of"),
        ('{"prompt": "1", "answer": "1"}', "[1,1,1]", r"has 4 language layers, but its chunks have 1 "),
    ],
)
def test_mistakes_are_one_sentence(line: str, layers: str, sentence: str, model: Any, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(line)
    model_file = tmp_path / "model" / "config.json"
    done = run("--model", model_file, "--data.path", file, "--layers", layers, ranks=2)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert 'finetune_hf.py", line' not in done.stderr
