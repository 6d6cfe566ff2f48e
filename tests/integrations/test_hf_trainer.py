"""hf.Trainer over three ranks against transformers.Trainer in one process: losses, norms, evaluation, checkpoints."""

from __future__ import annotations

import os
import re
import string
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hf_trainer import (
    LAYERS,
    RANKS,
    TOPOLOGY,
    arguments,
    as_of_torchrun,
    built,
    data,
    pipeline_of,
    split,
    whole,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedTokenizerFast, TrainerCallback

import ldt
from ldt.integrations import hf
from ldt.testing import RankPool

WORLD_SIZE = 3
# What is not compared: times, and metrics of the loss, which transformers.Trainer has not.
TIMED = ("runtime", "per_second", "flos", "time", "accuracy")
SAVES = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
BEST = {
    **SAVES,
    "max_steps": 30,
    "learning_rate": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}


def log(trainer: Any) -> list[dict[str, float]]:
    """What the Trainer logged, without times."""
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in TIMED)}
        for entry in trainer.state.log_history
    ]


def train(trainer: Any) -> Any:
    trainer.train()
    return log(trainer)


def resume(trainer: Any) -> Any:
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-8"))
    return log(trainer)


def best(trainer: Any) -> Any:
    """Train until there is no progress; then evaluate what that leaves."""
    trainer.add_callback(EarlyStoppingCallback(2))
    trainer.train()
    state = trainer.state
    assert state.best_global_step < state.global_step - 2 < 28
    return log(trainer), state.best_global_step, trainer.evaluate()["eval_loss"], state.best_metric


def most_likely(prediction: EvalPrediction) -> dict[str, float]:
    return {"mean": float(np.mean(prediction.predictions)), "labels": float(np.mean(prediction.label_ids))}


def predict(trainer: Any) -> Any:
    trainer.compute_metrics = most_likely
    metrics = {name: value for name, value in trainer.evaluate().items() if not any(w in name for w in TIMED)}
    return metrics, trainer.predict(data()["eval_dataset"]).predictions


def accuracy(trainer: Any) -> Any:
    """That of the loss function, and that of the predictions."""
    trainer.train()
    metrics = trainer.evaluate()
    found = metrics["eval_accuracy"]
    assert metrics["eval_accuracy_of_tokens"] == pytest.approx(found), "of a tensor, the mean"
    logits, labels, _ = trainer.predict(data()["eval_dataset"])
    counts = labels[:, 1:] != -100
    batches = [slice(start, start + 4) for start in range(0, 30, 4)]
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    assert found == pytest.approx(np.mean([right[batch][counts[batch]].mean() for batch in batches]))
    return [entry["accuracy"] for entry in trainer.state.log_history if "loss" in entry]


def scaled(trainer: Any) -> Any:
    """Learning rates and losses of updates, of which the first overflow."""
    trainer.train()
    return [(entry["learning_rate"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


USES = {
    "train": train,
    "resume": resume,
    "best": best,
    "predict": predict,
    "accuracy": accuracy,
    "scaled": scaled,
}


def sft(trainer: Any) -> Any:
    """Losses of TRL's SFTTrainer, which adds metrics of its own."""
    trainer.train()
    trainer.evaluate()
    return [
        {name: value for name, value in entry.items() if name in ("loss", "eval_loss", "grad_norm")}
        for entry in trainer.state.log_history
    ]


def sft_trainer(model: Any, args: Any, **_: Any) -> Any:
    """TRL's SFTTrainer for texts: for a pipeline or a whole model."""
    import trl
    from datasets import Dataset

    class SFTTrainer(hf.TrainerMixin, trl.SFTTrainer): ...

    texts = Dataset.from_dict({"text": [f"{letter} is a letter" for letter in "abcdefghij"]})
    kind = SFTTrainer if isinstance(model, ldt.Pipeline) else trl.SFTTrainer
    return kind(model, args, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer())


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *string.ascii_lowercase, " "])}
    letters = Tokenizer(WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def job(folder: str, kind: str, use: str, changes: dict[str, Any], tied: bool) -> Any:
    if use == "sft":
        import trl

        os.environ["HF_HUB_OFFLINE"] = "1"
        changes = {**changes, "kind": trl.SFTConfig}
        run = whole if kind == "whole" else split
        return run(Path(folder) / kind, sft, changes, tied, sft_trainer)
    if kind == "whole":
        return whole(Path(folder) / kind, USES[use], changes, tied)
    as_of_torchrun(dist.get_rank())
    return split(Path(folder) / kind, USES[use], changes, tied)


def both(
    pool: RankPool,
    folder: Path,
    use: str = "train",
    changes: dict[str, Any] | None = None,
    tied: bool = False,
) -> Any:
    """What hf.Trainer finds on the edge, and transformers.Trainer in one process."""
    found, *cloud = pool.run(job, str(folder), "split", use, changes or {}, tied, ranks=RANKS, timeout=60)
    assert cloud == [None, None]
    (expected,) = pool.run(job, str(folder), "whole", use, changes or {}, tied, ranks=[0], timeout=60)
    return found, expected


def refuse_other(found: Any, expected: Any, norms: float, others: float = 0.0) -> None:
    """Compare logs: gradient norms and all other values within relative bounds."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(
                other[name], rel=norms if name == "grad_norm" else others, abs=0.0
            ), name


def test_fifty_losses_and_evaluations_are_bit_equal(pool: RankPool, tmp_path: Path) -> None:
    """Epochs end with an update of fewer batches, and batches have different numbers of labels."""
    found, expected = both(
        pool, tmp_path, changes={"max_steps": 50, "eval_strategy": "steps", "eval_steps": 20}
    )
    losses = [entry["loss"] for entry in found if "loss" in entry]
    assert len(losses) == 50
    assert losses[-1] < 0.75 * losses[0]
    refuse_other(found, expected, norms=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipped_losses_and_tied_embeddings(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    found, expected = both(pool, tmp_path, changes={"max_grad_norm": 0.5, "max_steps": 10}, tied=tied)
    assert all(entry["grad_norm"] > 0.5 for entry in found if "loss" in entry)
    refuse_other(found, expected, norms=1e-5, others=1e-6)


@pytest.mark.parametrize("new", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "processes"])
def test_a_resumed_run_continues_the_curve(pool: RankPool, tmp_path: Path, new: bool) -> None:
    found, expected = both(pool, tmp_path, changes=SAVES)
    refuse_other(found, expected, norms=1e-6)
    if new:
        pool.kill()  # the next run starts new processes
    again, *_ = pool.run(job, str(tmp_path), "split", "resume", SAVES, False, ranks=RANKS, timeout=60)
    assert again[:-1] == found[:-1]  # the last has the loss of this run


def test_early_stopping_and_the_best_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    (found, *last), (expected, *wanted) = both(pool, tmp_path, "best", BEST)
    refuse_other(found, expected, norms=1e-6)
    assert last == wanted
    assert last[1] == last[2]


def test_predictions_and_metrics(pool: RankPool, tmp_path: Path) -> None:
    (metrics, logits), (expected, wanted) = both(pool, tmp_path, "predict")
    assert metrics == expected
    assert np.array_equal(logits, wanted)


def test_bfloat16_autocast(pool: RankPool, tmp_path: Path) -> None:
    found, expected = both(pool, tmp_path, changes={"bf16": True, "eval_strategy": "steps", "eval_steps": 3})
    refuse_other(found, expected, norms=1e-6)


def test_metrics_of_the_loss_function_are_logged(pool: RankPool, tmp_path: Path) -> None:
    values, *_ = pool.run(job, str(tmp_path), "split", "accuracy", {}, False, ranks=RANKS, timeout=60)
    assert len(values) == 6
    assert all(0 <= value <= 1 for value in values)


def test_float16_with_a_grad_scaler(pool: RankPool, tmp_path: Path) -> None:
    """Updates that overflow are skipped on all ranks, and leave the learning rate."""
    changes = {"fp16": True, "max_steps": 14, "warmup_steps": 0, "lr_scheduler_type": "linear"}
    found, *_ = pool.run(job, str(tmp_path), "split", "scaled", changes, False, ranks=RANKS, timeout=60)
    rates, losses = zip(*found, strict=True)
    skipped = rates.count(rates[0]) - 1
    assert 0 < skipped < 12
    assert losses[-1] < losses[0]


def test_trl_sft_trainer(pool: RankPool, tmp_path: Path) -> None:
    """It computes the loss from fused log-probabilities, so it differs in the last bits."""
    pytest.importorskip("trl")
    found, expected = both(pool, tmp_path, "sft", {"bf16": False, "max_length": 16})
    refuse_other(found, expected, norms=1e-5, others=1e-6)


def settled(folder: str) -> Any:
    """Ranks of the cloud get all they need from the edge: they have the config of the model only."""
    as_of_torchrun(dist.get_rank())
    model = Path(folder) / f"config-{dist.get_rank()}.json"
    built([1])[0].config.to_json_file(model)
    with ldt.connect(TOPOLOGY, ranks=RANKS) as mesh:
        if not mesh.is_edge:
            hf.follow(mesh, model)
            return None
        optimizer = hf.Optimizer(lr=3e-3, weight_decay=0.1)
        settings = hf.Settings(LAYERS, seed=2, loss_reduction="sum", optimizer=optimizer)
        job = hf.build(mesh, model, settings, loss_fn=hf.causal_lm_loss)
        args = arguments(Path(folder))
        with hf.Trainer(job.pipeline, args, optimizers=(job.optimizer, None), **data()) as trainer:
            return train(trainer)


def test_a_cloud_that_follows_without_a_script(pool: RankPool, tmp_path: Path) -> None:
    found, *_ = pool.run(settled, str(tmp_path), ranks=RANKS, timeout=60)
    changes = {"optim": "adamw_torch"}
    (expected,) = pool.run(job, str(tmp_path), "whole", "train", changes, False, ranks=[0], timeout=60)
    refuse_other(found, expected, norms=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------


class OtherLoss(hf.Trainer):
    def compute_loss(self, *_: Any, **__: Any) -> Any: ...


REFUSED: dict[str, dict[str, Any]] = {  # arguments of the Trainer, and of TrainingArguments
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "torch_compile": {"torch_compile": True},
    "push_to_hub": {"push_to_hub": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "optim='galore_adamw'": {"optim": "galore_adamw"},
    "optim='schedule_free_sgd'": {"optim": "schedule_free_sgd"},
    "fp16=True without a grad scaler": {"fp16": True},
    "model_init=": {"model_init": len},
    "compute_loss_func=": {"compute_loss_func": len},
    "peft_config=": {"peft_config": object()},
    "OtherLoss.compute_loss": {"trainer": OtherLoss},
    **({"needs arguments of another class": {"trainer": sft_trainer}} if find_spec("trl") else {}),
    "loss_reduction='token'": {"loss_reduction": "token"},
    "args must be TrainingArguments": {"args": None},
    "eval_strategy": {"eval_strategy": "epoch", "eval_dataset": None},
}
OF_TRAINER = ("model_init", "compute_loss_func", "peft_config", "eval_dataset")


def refusals(folder: str) -> list[str]:
    """What each rank raises, for each case on the same mesh. The last is no mistake."""
    as_of_torchrun(dist.get_rank())
    texts = []
    with ldt.connect(TOPOLOGY, ranks=RANKS) as mesh:
        chunks = built(TOPOLOGY.chunks_of(mesh.stage))
        for case in (*REFUSED.values(), {}):
            changes = dict(case)
            pipeline = pipeline_of(chunks, mesh, loss_reduction=changes.pop("loss_reduction", "sum"))
            text = ""
            try:
                if mesh.is_edge:
                    kind, args = changes.pop("trainer", hf.Trainer), changes.pop("args", True)
                    options = {name: changes.pop(name) for name in OF_TRAINER if name in changes}
                    with kind(pipeline, args and arguments(Path(folder), **changes), **{**data(), **options}):
                        pass
                else:
                    ldt.follow(pipeline, torch.optim.SGD(pipeline.parameters()), learning_rate="edge")
            except (ValueError, TypeError, ldt.LdtError) as error:
                text = f"{type(error).__name__}: {error}"
            texts.append(text)
    return texts


class Trips(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ValueError("the callback trips")


def broken(folder: str) -> str:
    def use(trainer: Any) -> None:
        trainer.add_callback(Trips())
        trainer.train()

    try:
        split(Path(folder), use, {})
    except (ValueError, ldt.LdtError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_on_the_edge_ends_the_cloud(pool: RankPool, tmp_path: Path) -> None:
    edge, *cloud = pool.run(broken, str(tmp_path), ranks=RANKS, timeout=60)
    assert edge == "ValueError: the callback trips"
    assert all(re.match("RemoteStageError: rank 0 ", text) for text in cloud), cloud


def own_rate(folder: str) -> str:
    with ldt.connect(TOPOLOGY, ranks=RANKS) as mesh:
        pipeline = pipeline_of(built(TOPOLOGY.chunks_of(mesh.stage)), mesh)
        try:
            if mesh.is_edge:
                hf.Trainer(pipeline, arguments(Path(folder)), **data())
            else:
                how = {"learning_rate": "edge"} if mesh.stage == 1 else {}
                ldt.follow(pipeline, torch.optim.SGD(pipeline.parameters()), **how)
        except ldt.LdtError as error:
            return str(error)
        return ""


def test_the_cloud_must_take_the_learning_rate(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(own_rate, str(tmp_path), ranks=RANKS, timeout=60)
    assert all(re.search(r"ranks \[2\] must follow with learning_rate='edge'", text) for text in texts), texts


def test_what_cannot_be_right_is_refused_by_name_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    edge, *cloud = pool.run(refusals, str(tmp_path), ranks=RANKS, timeout=60)
    for name, text in zip(REFUSED, edge, strict=False):
        assert re.search(rf"Error: .*{re.escape(name)}", text), (name, text)
    for texts in cloud:
        assert all(re.search("rank 0 cannot begin ldt.Leader or ldt.follow", text) for text in texts[:-1]), (
            texts
        )
    assert {edge[-1], cloud[0][-1], cloud[1][-1]} == {""}


@pytest.mark.slow
def test_the_cloud_needs_no_trainer() -> None:
    """It may have no accelerate, without which the Trainer cannot be imported."""
    code = "import sys; from ldt.integrations import hf; sys.exit('transformers.trainer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_the_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['accelerate'] = None; from ldt.integrations import hf; hf.Trainer"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.rstrip().endswith("hf.Trainer needs accelerate: pip install 'ldt-torch[trainer]'")
