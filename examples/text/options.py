"""The command-line options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from text.arguments import count, count_or_zero, positive
from text.device import add_device_options

__all__ = ["Options", "parse_options"]


class Options(argparse.Namespace):
    """The parsed command line. Tokens are bytes."""

    stages: tuple[int, ...]
    dp: int
    edge_dp: int | None
    laps: int
    lanes: Literal["dedicated", "paired"]
    microbatches: int
    text: Path | None = None
    width: int
    layers: int = 0
    sequence: int
    steps: int
    device: Literal["auto", "cpu", "cuda", "npu"]
    dtype: Literal["float32", "bfloat16"]
    compile: bool
    batch: int
    lr: float
    loss_reduction: Literal["mean", "token"]
    seed: int
    check: bool
    prompt: str
    continuation: int
    output: Path


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parse the command line. Ends the process with one sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Train a small language model on bytes of English text, split in a U: its first and last layers "
        "on stage 0, the edge, the layers between on the others. Start it with torchrun, one process "
        "per rank: those of stage 0 times --edge-dp and those of all other stages times --dp.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_split(parser.add_argument_group("how the model is split"))
    _add_model(parser.add_argument_group("model and text"))
    _add_training(parser.add_argument_group("training"))
    _add_device(parser.add_argument_group("where it runs"))
    _add_results(parser.add_argument_group("results"))
    options = parser.parse_args(arguments, namespace=Options())
    options.layers = options.layers or len(options.stages) * (options.laps + 1)
    return options


# fmt: off
def _add_split(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stages", type=_sizes, default="1,1,1", metavar="N,N,...",
                       help="ranks of each stage, the edge first; layers are split over the ranks of a stage")
    group.add_argument("--dp", type=count, default=1, metavar="N",
                       help="replicas of the cloud stages")
    group.add_argument("--edge-dp", type=count, default=None, metavar="N",
                       help="replicas of the edge, each serving some of the cloud's (default: as many)")
    group.add_argument("--laps", type=count, default=1, metavar="N",
                       help="walks through all stages in one forward")
    group.add_argument("--microbatches", type=count, default=8, metavar="N",
                       help="microbatches of a step, for each replica of the edge")
    group.add_argument("--lanes", choices=("dedicated", "paired"), default="dedicated",
                       help="a communicator for each channel, or shared ones (ping and pang)")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--text", type=Path, default=argparse.SUPPRESS, metavar="FILE",
                       help="text to learn (default: the documentation topics that come with Python)")
    group.add_argument("--layers", type=count, default=argparse.SUPPRESS, metavar="N",
                       help="at least one for each chunk (default: equally many for each stage)")
    group.add_argument("--width", type=_width, default=96, metavar="N",
                       help="features of a token, a multiple of 32")
    group.add_argument("--sequence", type=count, default=64, metavar="N",
                       help="tokens that the model sees at once")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=count, default=500, metavar="N",
                       help="optimizer steps")
    group.add_argument("--batch", type=count, default=2, metavar="N",
                       help="sequences of a microbatch")
    group.add_argument("--lr", type=positive, default=5e-3,
                       help="highest learning rate")
    group.add_argument("--loss-reduction", choices=("mean", "token"), default="mean",
                       help="mean over microbatches, or over the tokens of a step")
    group.add_argument("--seed", type=int, default=1,
                       help="of the weights, the batches and the continuation")
    group.add_argument("--check", action="store_true",
                       help="repeat the first steps in one process and compare, bit for bit where sums are made in "
                            "one order, that is, without replicas and with one rank in each stage")


def _add_device(group: argparse._ArgumentGroup) -> None:
    add_device_options(group)
    group.add_argument("--compile", action="store_true",
                       help="compile the layers with torch.compile")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", default="The ",
                       help="text that the trained model continues")
    group.add_argument("--continuation", type=count_or_zero, default=240, metavar="N",
                       help="tokens to continue it by")
    group.add_argument("--output", type=Path, default=Path("build/demo"), metavar="DIR",
                       help="folder for the trace and the picture")
# fmt: on


def _width(text: str) -> int:
    value = count(text)
    if value % 32:
        raise argparse.ArgumentTypeError(f"must be a multiple of 32, got {value}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(count(size) for size in text.split(","))
