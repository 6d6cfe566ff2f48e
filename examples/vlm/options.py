"""The command-line options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from text.arguments import count, count_or_zero, positive, positive_or_zero
from text.device import add_device_options
from text.recipe import MAX_NORM

__all__ = ["Options", "parse_options"]


class Options(argparse.Namespace):
    """The parsed command line."""

    steps: int
    microbatches: int
    batch: int
    lr: float
    clip: float
    seed: int
    device: Literal["auto", "cpu", "cuda", "npu"]
    dtype: Literal["float32", "bfloat16"]
    eval_every: int
    checkpoints: Path | None
    save_every: int
    output: Path | None
    tensorboard: Path | None


# fmt: off
def parse_options(arguments: list[str] | None = None) -> Options:
    """Parse the command line. Ends the process with one sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Train a small Qwen2.5-VL in a U to name the digit in an image. Start it with torchrun: each "
                    "process is a stage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_training(parser.add_argument_group("training"))
    add_device_options(parser.add_argument_group("where it runs"))
    _add_results(parser.add_argument_group("results"))
    options = parser.parse_args(arguments, namespace=Options())
    if options.output is not None and options.checkpoints is None:
        parser.error("--output merges the last checkpoint: give --checkpoints DIR, too")
    return options


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=count, default=400, metavar="N",
                       help="optimizer steps in all")
    group.add_argument("--microbatches", type=count, default=4, metavar="N",
                       help="microbatches of a step; a fourth has no images")
    group.add_argument("--batch", type=count, default=16, metavar="N",
                       help="samples of a microbatch")
    group.add_argument("--lr", type=positive, default=3e-3,
                       help="highest learning rate")
    group.add_argument("--clip", type=positive_or_zero, default=MAX_NORM, metavar="NORM",
                       help="largest norm of all gradients together; 0: any")
    group.add_argument("--seed", type=int, default=1,
                       help="of the weights and the samples")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--eval-every", type=count_or_zero, default=0, metavar="N",
                       help="steps between evaluations; 0: only before and after training")
    group.add_argument("--checkpoints", type=Path, metavar="DIR",
                       help="folder for saves; if it has one, training goes on from the newest")
    group.add_argument("--save-every", type=count, default=100, metavar="N",
                       help="steps between saves; there is one at the end, too")
    group.add_argument("--output", type=Path, metavar="DIR",
                       help="folder for the trained model, for transformers' from_pretrained")
    group.add_argument("--tensorboard", type=Path, metavar="DIR",
                       help="folder for the scalars of each step")
# fmt: on
