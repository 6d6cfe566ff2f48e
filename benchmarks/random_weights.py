"""How long does it take to give a model random weights?

A Llama in bfloat16 on one core or on a GPU, about 1.2 billion parameters on a GPU unless options say otherwise. Paths:

- ``CPU, moved``  built and drawn on the CPU, then moved to the device: the baseline
- ``in place``    built and drawn on the device

``build`` allocates the weights, ``draw`` is ``hf.init_weights``, ``move`` copies them to the device; seconds. Elements
that are NaN, and those that differ where each layer is a chunk of its own, are wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from harness import Row, column, parse, parser, run
from picture import Picture
from transformers import LlamaConfig
from transports import device_of

from ldt.integrations import hf

WIDTHS = {"cuda": 2048, "cpu": 256}
SEED = 1


@dataclass(frozen=True)
class DrawRow:
    """One path."""

    PICTURE: ClassVar[Picture] = Picture("path", ("build", "draw", "move"), ())
    path: str = column("path", "<10")
    parameters: int = column("parameters", ">13,")
    build: float = column("build s", ">8.2f")
    draw: float = column("draw s", ">8.2f")
    move: float = column("move s", ">8.2f")
    all: float = column("all s", ">8.2f")
    wrong: int = column("#wrong", ">7")


def config_of(arguments: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=max(1, arguments.width // 256),
        vocab_size=arguments.vocabulary,
        tie_word_embeddings=True,
    )


def measure_path(arguments: argparse.Namespace, path: str) -> DrawRow:
    device = device_of(arguments)
    parts = hf.split(config_of(arguments), [arguments.layers, 0])
    times = [time.perf_counter()]

    def lap() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    where = "cpu" if path == "CPU, moved" else device
    chunks = parts.build(range(parts.num_chunks), device=where, dtype=torch.bfloat16)
    lap()
    hf.init_weights(chunks, SEED)
    lap()
    drawn = hf.state_dict(chunks)
    state = {name: tensor.to(device) for name, tensor in drawn.items()}
    lap()
    build, draw, move = (end - start for start, end in pairwise(times))
    return DrawRow(
        path=path,
        parameters=sum({tensor.data_ptr(): tensor.numel() for tensor in drawn.values()}.values()),
        build=build,
        draw=draw,
        move=move,
        all=times[-1] - times[0],
        wrong=wrong_elements(arguments, state, torch.device(where)),
    )


def wrong_elements(arguments: argparse.Namespace, state: dict[str, torch.Tensor], where: torch.device) -> int:
    """Draw the chunks of another split one by one, and compare."""
    parts = hf.split(config_of(arguments), [1] * arguments.layers + [0])
    wrong = sum(int(tensor.isnan().sum()) for tensor in state.values())
    for index in range(parts.num_chunks):
        chunks = parts.build([index], device=where, dtype=torch.bfloat16)
        hf.init_weights(chunks, SEED)
        for name, tensor in hf.state_dict(chunks).items():
            wrong += int((tensor.to(state[name].device) != state[name]).sum())
    return wrong


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    torch.randn(1, device=device_of(arguments))  # starts the device
    for path in ("CPU, moved", "in place"):
        yield measure_path(arguments, path)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    options.add_argument(
        "--width", type=int, help="hidden size, a multiple of 64; default: 2048, on a CPU 256"
    )
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--vocabulary", type=int, default=128_256)
    given = parse(options, lambda given: 1)
    given.width = given.width or WIDTHS[given.device]
    sys.exit(run(measure, given, f"{given.layers} layers of width {given.width}, {given.device}"))
