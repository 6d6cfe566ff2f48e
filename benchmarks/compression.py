"""How long does it take to pack a tensor for a slow link, and to unpack it?

Each row is one tensor of ``--elements`` random numbers, on one core or on a GPU. Paths:

- ``torch bf16``  torch's own ``.to(bfloat16)`` and back, which is also compression="bf16": the first baseline
- ``torch fp8``   torch's own ``.to(float8_e4m3fn)`` and back, without scales: the second baseline
- ``8bit``        compression="8bit": fp8 e4m3 with a scale for each 128 elements

Times are medians in milliseconds per MiB of the tensor. ``error`` is the norm of what is lost over that of the tensor,
``bytes`` the share of its bytes that is sent. Rows of ``8bit`` count elements beyond its error bound as wrong, others
those that differ from a cast of one element at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from harness import Row, column, parse, parser, run
from picture import Picture
from transports import device_of

from ldt._C import pack_8bit, unpack_8bit

BLOCK = 128
MIB = 2**20


@dataclass(frozen=True)
class PackRow:
    """One path over one dtype."""

    PICTURE: ClassVar[Picture] = Picture("dtype", ("pack", "unpack"), ("path",))
    dtype: str = column("dtype", "<9")
    path: str = column("path", "<11")
    pack: float = column("pack ms/MiB", ">12.4f")
    unpack: float = column("unpack ms/MiB", ">14.4f")
    both: float = column("both", ">8.4f")
    share: float = column("bytes", ">7.4f")
    error: float = column("error", ">8.5f")
    wrong: int = column("#wrong", ">7")


@dataclass(frozen=True)
class Path:
    name: str
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, torch.Tensor], None]  # from, into
    wrong: Callable[[torch.Tensor, torch.Tensor], int]  # what was packed, what arrived


def cast(name: str, dtype: torch.dtype) -> Path:
    def wrong(tensor: torch.Tensor, arrived: torch.Tensor) -> int:
        some = slice(0, None, max(1, tensor.numel() // 1000))
        expected = torch.stack([element.to(dtype).to(tensor.dtype) for element in tensor[some]])
        return int((expected != arrived[some]).sum())

    return Path(
        name, lambda tensor: tensor.to(dtype), lambda packed, tensor: void(tensor.copy_(packed)), wrong
    )


def void(_: object) -> None:
    """Drop a result."""


def beyond_bound(tensor: torch.Tensor, arrived: torch.Tensor) -> int:
    whole = tensor.numel() // BLOCK * BLOCK
    blocks, found = (part[:whole].double().view(-1, BLOCK) for part in (tensor, arrived))
    bound = torch.maximum(blocks.abs() / 16, blocks.abs().amax(1, keepdim=True) / 229376)
    return int(((found - blocks).abs() > bound).sum())


PATHS = (
    cast("torch bf16", torch.bfloat16),
    cast("torch fp8", torch.float8_e4m3fn),
    Path("8bit", pack_8bit, unpack_8bit, beyond_bound),
)


def seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """The median, after some that do not count."""
    took = []
    for index in range(count + 3):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 3:
            took.append(time.perf_counter() - start)
    return statistics.median(took)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(arguments.elements, generator=generator).to(device, dtype)
        for path in PATHS:
            packed = path.pack(tensor)
            arrived = torch.empty_like(tensor)
            path.unpack(packed, arrived)
            size = tensor.nbytes / MIB
            pack, unpack = (
                1e3 * seconds(call, arguments.count, device) / size
                for call in (
                    lambda: path.pack(tensor),  # noqa: B023 (called before the next)
                    lambda: path.unpack(packed, arrived),  # noqa: B023
                )
            )
            yield PackRow(
                dtype=str(dtype).removeprefix("torch."),
                path=path.name,
                pack=pack,
                unpack=unpack,
                both=pack + unpack,
                share=packed.nbytes / tensor.nbytes,
                error=float((arrived.double() - tensor.double()).norm() / tensor.double().norm()),
                wrong=path.wrong(tensor, arrived),
            )


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    options.add_argument("--elements", type=int, default=2**20, help="of the tensor")
    options.add_argument("--count", type=int, default=50, help="calls for each time")
    given = parse(options, lambda given: 1)
    sys.exit(run(measure, given, f"{given.elements} elements, {given.device}"))
