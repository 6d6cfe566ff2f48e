"""Jobs of hf.Trainer on the edge and ldt.follow on the cloud, and the same job for transformers.Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_models import text_config, unsplit
from torch.utils.data import Dataset

import ldt
from ldt.integrations import hf

TOPOLOGY = ldt.Topology([1, 1, 1])
LAYERS = [1, 2, 1, 1]
RANKS = range(3)


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Padded rows of tokens that a small model can learn."""

    def __init__(self, number: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(3, 90, (number, 1), generator=generator)
        ids = (first + 3 * torch.arange(10)) % 87 + 3
        lengths = torch.randint(4, 11, (number, 1), generator=generator)
        mask = torch.arange(10) < lengths
        self.rows = [
            {"input_ids": row * kept, "attention_mask": kept.long(), "labels": row.masked_fill(~kept, -100)}
            for row, kept in zip(ids, mask, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def arguments(
    folder: Path, kind: Any = transformers.TrainingArguments, **changes: Any
) -> transformers.TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(**{**options, **changes})


def data() -> dict[str, Any]:
    return {"train_dataset": Texts(30), "eval_dataset": Texts(30, seed=1)}


Use = Callable[[Any], Any]  # what is done with a trainer


def built(indices: Any, tied: bool = False) -> list[hf.Chunk]:
    parts = hf.split(text_config("llama", tie_word_embeddings=tied), LAYERS)
    chunks = parts.build(indices)
    hf.init_weights(chunks, seed=2)
    return chunks


def loss_and_accuracy(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> Any:
    following, counts = labels[:, 1:], labels[:, 1:] != -100
    right = logits[:, :-1].argmax(-1) == following
    metrics = {"accuracy": right[counts].float().mean(), "accuracy_of_tokens": right[counts]}
    return hf.causal_lm_loss(logits, labels, **options), metrics


def pipeline_of(chunks: list[hf.Chunk], mesh: ldt.Mesh, **options: Any) -> ldt.Pipeline:
    loss_fn = loss_and_accuracy if mesh.is_edge else None
    return ldt.Pipeline(chunks, mesh, loss_fn=loss_fn, **{"loss_reduction": "sum", **options})


def whole(
    folder: Path,
    use: Use,
    changes: dict[str, Any],
    tied: bool = False,
    trainer_of: Callable[..., Any] = transformers.Trainer,
) -> Any:
    """``use(trainer)`` for transformers.Trainer, in this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    chunks = built(range(4), tied)
    model = unsplit(chunks[0].config, chunks, 1, "sdpa")
    trainer = trainer_of(model, arguments(folder, **changes), **data())
    trainer.remove_callback(transformers.PrinterCallback)
    return use(trainer)


def split(
    folder: Path,
    use: Use,
    changes: dict[str, Any],
    tied: bool = False,
    trainer_of: Callable[..., Any] | None = None,
) -> Any:
    """``use(trainer)`` for hf.Trainer on the edge; None on the cloud."""
    torch.set_num_threads(1)
    with ldt.connect(TOPOLOGY, ranks=RANKS) as mesh:
        args = arguments(folder, **changes)
        scaler = ldt.GradScaler(mesh, init_scale=2.0**20) if args.fp16 else None
        of_edge = scaler if mesh.is_edge else None
        pipeline = pipeline_of(built(TOPOLOGY.chunks_of(mesh.stage), tied), mesh, grad_scaler=of_edge)
        if not mesh.is_edge:
            optimizer = hf.create_optimizer(pipeline, args)
            # Steps compute in the edge's autocast dtype, whether or not all of follow is under autocast.
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16 and mesh.stage == 1):
                ldt.follow(
                    pipeline,
                    optimizer,
                    scaler=scaler,
                    learning_rate="edge",
                    checkpoints=folder / f"stage-{mesh.stage}",
                )
            return None
        environment = dict(os.environ)
        with (trainer_of or hf.Trainer)(pipeline, args, **data()) as trainer:
            assert dict(os.environ) == environment
            trainer.remove_callback(transformers.PrinterCallback)
            return use(trainer)


def as_of_torchrun(rank: int) -> None:
    """Set what torchrun sets, which accelerate would take for data parallel processes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
