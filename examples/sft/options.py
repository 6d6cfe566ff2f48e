"""The options of the fine-tuning recipe: a TOML or YAML file, and what the command line changes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from ldt.integrations import hf

__all__ = ["Data", "Options", "parse_options"]


@dataclass
class Data:
    """The samples, which only the edge reads.

    Attributes:
        path: JSONL or Parquet file, or name of a dataset on the hub; samples have "prompt" and "answer", "messages" of
            a chat, or "text".
        split: split of a dataset on the hub
        validation: held-out samples, a path like the above or a share of the samples
        longest: tokens of a row; what is longer is cut, or left out if no answer remains
        packing: put several samples into a row, which do not attend to each other
    """

    path: str
    split: str = "train"
    validation: float | str = 0.0
    longest: int = 2048
    packing: bool = False


@dataclass
class Options:
    """Fine-tuning.

    Attributes:
        model: folder or hub name, or a config.json for random weights and bytes as tokens
        data: the samples, which only the edge reads
        layers: number of layers of each chunk, one more than stages (default: even)
        adapter: train low-rank adapters instead of all weights
        optimizer: that of every rank
        schedule: of the learning rate, by its name in transformers
        warm_up: share of the steps in which the learning rate rises
        max_norm: limit for the norm of all gradients
        steps: optimizer steps; default: those of the epochs
        epochs: passes over the samples
        microbatches: of a step
        batch: rows of a microbatch
        weights: dtype of the weights; default: that of the model
        autocast: dtype to compute in, with weights in float32
        attention: as in transformers; default: its own choice
        checkpointing: recompute activations in the backward
        compile: compile layers
        device: auto takes GPUs or NPUs if the host has some
        output: folder for checkpoints, TensorBoard and the trained model
        save_every: steps between checkpoints
        validate_every: steps between evaluations
        prompts: texts that the model continues after each evaluation
        generate: tokens of a continuation
        report_every: steps between reports of bubble and link
        tensorboard: write scalars into the output folder
        resume: go on from the newest checkpoint in the output folder
        merge: write the trained model into the output folder, where all stages' checkpoints are on this host
        seed: of the order of samples, random weights, adapters and dropout
    """

    model: str
    data: Data
    layers: list[int] | None = None
    adapter: hf.Adapter | None = None
    optimizer: hf.Optimizer = field(default_factory=hf.Optimizer)
    schedule: str = "cosine"
    warm_up: float = 0.05
    max_norm: float = 1.0
    steps: int | None = None
    epochs: float = 1.0
    microbatches: int = 8
    batch: int = 2
    weights: Literal["float32", "bfloat16", "float16"] | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = (
        None
    )
    checkpointing: bool = False
    compile: bool = False
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    output: Path | None = None
    save_every: int = 100
    validate_every: int = 100
    prompts: list[str] = field(default_factory=list)
    generate: int = 50
    report_every: int = 10
    tensorboard: bool = False
    resume: bool = True
    merge: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a number that cannot be right."""
        positive = (
            "microbatches",
            "batch",
            "save_every",
            "validate_every",
            "report_every",
            "epochs",
            "max_norm",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.data.longest < 2:
            raise ValueError(f"data.longest must be at least 2, got {self.data.longest}")
        if not 0 < self.optimizer.lr < math.inf:
            raise ValueError(f"optimizer.lr must be a number above 0, got {self.optimizer.lr}")
        if self.adapter is not None and self.adapter.rank < 1:
            raise ValueError(f"adapter.rank must be at least 1, got {self.adapter.rank}")
        if self.autocast is not None and self.weights not in (None, "float32"):
            raise ValueError(f"autocast={self.autocast} needs weights in float32, got {self.weights}")
        if self.adapter is not None and self.output is not None and self.merge and Path(self.model).is_file():
            raise ValueError(
                "adapters of a config alone cannot be merged, as its weights are random: give merge=false, or a model "
                "folder"
            )
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"warm_up must be a share from 0 to 1, got {self.warm_up}")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Ends the process with one sentence if it is wrong."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    mode = "toml" if any(argument.endswith(".toml") for argument in arguments) else "yaml"
    parser = ArgumentParser(
        prog="finetune_hf.py",
        description="Fine-tune a causal language model from the Hugging Face hub in a U: data, loss, first and last "
        "layers stay on the edge. Start it with torchrun or python -m ldt launch, one process per stage.",
        parser_mode=mode,
    )
    parser.add_argument("--config", action="config", help="TOML or YAML file with these options")
    parser.add_class_arguments(Options)
    parsed = vars(parser.instantiate(parser.parse_args(arguments)))
    del parsed["config"]
    try:
        return Options(**parsed)
    except ValueError as error:
        parser.error(str(error))
