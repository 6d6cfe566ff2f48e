"""The fine-tuning example as users start it: from a folder with a tokenizer, from a config alone, with LoRA."""

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
pytest.importorskip("tqdm")

SCRIPT = str(Path(__file__).parents[2] / "examples" / "finetune_hf.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
}


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

    words = ["</s>", "?", "+", "=", *map(str, range(13))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        tie_word_embeddings=True, initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.save_pretrained(tmp_path / "model")
    return made


def run(*arguments: object, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sizes = ["--steps=8", "--microbatches=3", "--batch=9", "--lr=0.01"]
    return subprocess.run(
        [*launcher, SCRIPT, *sizes, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+) per token", done.stdout))
    return first, last


def merged(folder: Path, stages: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = [load_file(folder / f"stage{stage}.safetensors") for stage in range(stages)]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def test_stages_train_their_layers_of_a_checkpoint(model: Any, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    first, last = losses(run("--model", tmp_path / "model", "--data", data, "--output", output))
    assert last < 0.8 * first
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(merged(output, 3))
    assert not any(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_adapters_of_all_stages_fit_the_unsplit_model(model: Any, data: Path, tmp_path: Path) -> None:
    import peft

    output = tmp_path / "out"
    losses(run("--model", tmp_path / "model", "--data", data, "--output", output, "--lora", 4))
    whole = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = {f"base_model.model.{name}": tensor for name, tensor in merged(output, 3).items()}
    assert trained.keys() == peft.get_peft_model_state_dict(whole).keys()
    assert all(tensor.any() for tensor in trained.values())
    assert not peft.set_peft_model_state_dict(whole, trained).unexpected_keys


@pytest.mark.slow
def test_a_config_alone_gives_random_weights_and_bytes(model: Any, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    first, last = losses(run("--model", config, "--data", data, "--layers", 1, 2, 1, ranks=2))
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "layers", "sentence"),
    [
        (
            '{"prompt": "1 + 1 ="}',
            [],
            r'line 1: expected {"prompt": "...", "answer": "..."}, got {"prompt": "1',
        ),
        ("", [], r"wrong.jsonl has no samples: expected lines of"),
        (
            '{"prompt": "1", "answer": "1"}',
            ["--layers", 1, 1, 1],
            r"has 4 language layers, but its chunks have 1 ",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    line: str, layers: list[Any], sentence: str, model: Any, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(line)
    done = run("--model", tmp_path / "model" / "config.json", "--data", file, *layers, ranks=2)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert 'finetune_hf.py", line' not in done.stderr
