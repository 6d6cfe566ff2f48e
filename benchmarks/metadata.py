"""How long do packing and unpacking a step's metadata take?

A step has 64 microbatches, each with an attention mask and position ids, int64 [4, 4096]. Paths:

- ``tensor ops``  the baseline: small tensor operations, one microbatch at a time, as code without a wire format does it
  (padding on one side only; its message is a list of numbers)
- ``one call``    ldt.runtime.step.metadata.pack and unpack
- ``no rows``     the same with rows of one element: the cost of a call apart from scanning and rebuilding rows

Times are in microseconds per step: the median and 90th percentile of the whole call on the host, including the
device's work (with ``--device cuda``, the device is synchronized after each call). ``GB/s`` counts masks and positions
once. ``returns`` is the time until an unpack, which does not wait for the device, returns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from harness import Row, column, parse, parser, run
from picture import Picture
from transports import device_of

from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.step.metadata import MicrobatchMetadata, StepMessage, has_metadata_kernels, pack, unpack

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepRow:
    """One direction of one path over one kind of masks."""

    PICTURE: ClassVar[Picture] = Picture("masks", ("p50",), ("path", "what"))
    masks: str = column("masks", "<8")
    path: str = column("path", "<12")
    what: str = column("what", "<8")
    p50: float = column("p50 µs", ">10.0f")
    p90: float = column("p90 µs", ">10.0f")
    returns: float = column("returns µs", ">11.0f")
    gigabytes_per_second: float = column("GB/s", ">7.2f")
    message: int = column("message", ">8")
    wrong: int = column("#wrong", ">7")


def mask_of(kind: str, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return a mask whose rows differ, unless they have no padding."""
    index = torch.arange(length).expand(batch, -1)
    cut = torch.randint(length // 4, length // 2 + 1, (batch, 1), generator=generator)
    match kind:
        case "none":
            return torch.ones(batch, length, dtype=torch.int64)
        case "left":
            return (index >= cut).long()
        case "packed":
            return (index >= cut // 4).long() + (index >= cut) + (index >= length - cut // 2)
        case _:
            return torch.randint(0, 2, (batch, length), generator=generator)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the running count of unmasked elements, with 1 on padding."""
    kept = mask != 0
    return (kept.long().cumsum(-1) - 1).masked_fill(~kept, 1)


def pack_with_tensor_ops(microbatches: Sequence[Tensors]) -> torch.Tensor:
    """Return each microbatch's shape and each row's padding; device results are copied to the host at once."""
    figures = []
    for tensors in microbatches:
        mask = tensors["attention_mask"]
        length = mask.shape[-1]
        kept = (mask != 0).long()
        left = kept.argmax(-1)
        right = kept.flip(-1).argmax(-1)
        simple = kept.sum(-1) == length - left - right
        shape = torch.tensor(mask.shape, device=mask.device)
        figures += [shape, left, right, simple.long()]
    return torch.cat(figures).cpu()


def unpack_with_tensor_ops(data: torch.Tensor, device: torch.device) -> list[Tensors]:
    """Rebuild masks and positions from the numbers, one microbatch at a time."""
    result: list[Tensors] = []
    data_there, place = data.to(device), 0
    while place < len(data):
        batch, length = data[place : place + 2].tolist()
        left, right = data_there[place + 2 : place + 2 + 2 * batch].view(2, batch, 1)
        index = torch.arange(length, device=device)
        mask = ((index >= left) & (index < length - right)).long()
        result.append({"attention_mask": mask, "position_ids": positions_of(mask)})
        place += 2 + 3 * batch
    return result


def message_of(microbatches: Sequence[Tensors]) -> StepMessage:
    shape = tuple(microbatches[0]["attention_mask"].shape)
    hop = (TensorSpec((*shape, 2048), torch.bfloat16, True),)
    return StepMessage(
        "step",
        "0123456789abcdef",
        "autocast=None",
        None,
        tuple(MicrobatchMetadata(index, (hop,), tensors) for index, tensors in enumerate(microbatches)),
    )


def wrong_elements(truth: Sequence[Tensors], got: Sequence[Tensors]) -> int:
    return sum(
        int((want[name] != have[name]).sum()) if want[name].dtype == have[name].dtype else want[name].numel()
        for want, have in zip(truth, got, strict=True)
        for name in want
    )


def time_calls(call: Callable[[], Any], count: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the seconds until the device is done, and until the call returned; the first calls are warm-up."""
    done, returned = [], []
    for index in range(count + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        middle = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        del result
        if index >= 3:
            done.append(end - start)
            returned.append(middle - start)
    return done, returned


def rows_of(
    names: tuple[str, str],
    truth: Sequence[Tensors],
    pack_it: Callable[[], torch.Tensor],
    unpack_it: Callable[[torch.Tensor], Sequence[Tensors]],
    arguments: argparse.Namespace,
) -> list[StepRow]:
    device = truth[0]["attention_mask"].device
    data = pack_it()
    wrong = wrong_elements(truth, unpack_it(data))
    size = sum(tensor.nbytes for tensors in truth for tensor in tensors.values())
    made = []
    for what, call in (("pack", pack_it), ("unpack", lambda: unpack_it(data))):
        done, returned = time_calls(call, arguments.count, device)
        median = statistics.median(done)
        slow = sorted(done)[round(0.9 * (len(done) - 1))]
        made.append(
            StepRow(
                *names,
                what,
                median * 1e6,
                slow * 1e6,
                statistics.median(returned) * 1e6,
                size / median / 1e9,
                data.nbytes,
                wrong,
            )
        )
    return made


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    device = device_of(arguments)
    generator = torch.Generator().manual_seed(0)

    def unpack_all(data: torch.Tensor) -> Sequence[Tensors]:
        message = unpack(data, device)
        assert isinstance(message, StepMessage)
        return [microbatch.tensors for microbatch in message.microbatches]

    for kind in arguments.masks:
        steps = {}
        for path, length in (("one call", arguments.length), ("no rows", 1)):
            masks = [
                mask_of(kind, arguments.batch, length, generator).to(device)
                for _ in range(arguments.microbatches)
            ]
            steps[path] = [{"attention_mask": mask, "position_ids": positions_of(mask)} for mask in masks]
        if kind in ("none", "left"):
            truth = steps["one call"]
            yield from rows_of(
                (kind, "tensor ops"),
                truth,
                lambda truth=truth: pack_with_tensor_ops(truth),  # type: ignore[misc]
                lambda data: unpack_with_tensor_ops(data, device),
                arguments,
            )
        for path, truth in steps.items():
            message = message_of(truth)
            yield from rows_of(
                (kind, path),
                truth,
                lambda message=message: pack(message),  # type: ignore[misc]
                unpack_all,
                arguments,
            )


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    kinds = ["none", "left", "packed", "holes"]
    options.add_argument("--microbatches", type=int, default=64, help="per step")
    options.add_argument("--batch", type=int, default=4, help="rows of a mask")
    options.add_argument("--length", type=int, default=4096, help="elements of a row")
    options.add_argument("--count", type=int, default=50, help="steps per row")
    options.add_argument("--masks", nargs="+", default=kinds, choices=kinds, help="kinds of masks")
    given = parse(options, lambda given: 1)
    kernels = "with" if has_metadata_kernels(torch.device(given.device)) else "without"
    context = (
        f"{given.microbatches} microbatches of {given.batch} rows of {given.length} elements, "
        f"{given.device}, {kernels} kernels"
    )
    sys.exit(run(measure, given, context))
