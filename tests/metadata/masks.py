"""Masks, positions and grids in every form that a data loader or an inventive user may create."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.step.metadata import MicrobatchMetadata, StepMessage, unpack

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
ROW_KINDS = ("none", "left", "right", "both", "packed", "padded packed", "holes", "empty", "numbers")


def fits(dtype: torch.dtype, value: int) -> int:
    """Convert ``value`` to the dtype; bool and uint8 cannot represent all numbers of segments."""
    if dtype is torch.bool:
        return int(value != 0)
    limits = torch.iinfo(dtype)
    return limits.min + (value - limits.min) % (limits.max - limits.min + 1)


@st.composite
def rows(draw: st.DrawFn, length: int, kind: str | None = None) -> list[int]:
    """Draw one row of a mask."""
    kind = kind or draw(st.sampled_from(ROW_KINDS))
    left = draw(st.integers(0, length)) if kind in ("left", "both", "padded packed") else 0
    right = draw(st.integers(0, length - left)) if kind in ("right", "both", "padded packed") else 0
    kept = length - left - right
    if kind == "empty":
        return [0] * length
    if kind == "holes":
        return draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    if kind == "numbers":
        return draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=length, max_size=length))
    middle = [1] * kept
    if "packed" in kind:
        starts = draw(st.sets(st.integers(1, max(1, kept - 1)), max_size=6))
        middle = [1 + sum(start <= index for start in starts) for index in range(kept)]
    return [0] * left + middle + [0] * right


def tensor_of(values: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values in the dtype, also in dtypes that torch cannot compute with."""
    flat = [fits(dtype, value) for value in values]
    if dtype is torch.uint64:
        flat = [value - 2**64 if value >= 2**63 else value for value in flat]
        return torch.tensor(flat, dtype=torch.int64).view(torch.uint64).reshape(shape)
    return torch.tensor(flat, dtype=dtype).reshape(shape)


@st.composite
def masks(draw: st.DrawFn, kind: str | None = None, max_length: int = 40) -> torch.Tensor:
    """Draw a mask of 1 to 4 dimensions, also without rows or with rows of 0 or 1 elements."""
    leading = draw(st.lists(st.integers(0, 3), max_size=3))
    length = draw(st.one_of(st.integers(0, 3), st.integers(0, max_length)))
    count = 1
    for size in leading:
        count *= size
    values = [value for _ in range(count) for value in draw(rows(length, kind))]
    return tensor_of(values, draw(st.sampled_from(INTEGERS + UNSIGNED)), (*leading, length))


def running_count(mask: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the positions that Hugging Face models compute from a mask."""
    kept = mask != 0
    return (kept.long().cumsum(-1) - 1).masked_fill(~kept, padding)


def segment_positions(mask: torch.Tensor, padding: int) -> torch.Tensor:
    """Return positions that restart with every segment, by a plain loop."""
    flat = mask.reshape(-1, mask.shape[-1]).tolist()
    for row in flat:
        before, position = 0, 0
        for index, value in enumerate(row):
            position = position + 1 if value == before else 0
            before = value
            row[index] = position if value else padding
    return torch.tensor(flat, dtype=torch.int64).reshape(mask.shape)


@st.composite
def positions(draw: st.DrawFn, mask: torch.Tensor) -> torch.Tensor:
    """Draw position_ids by each rule, as [S], like the mask, or for three axes, and some that follow no rule."""
    padding = draw(st.sampled_from((0, 1, -1, 7, 2**40)))
    length = mask.shape[-1]
    signed = mask.view(torch.int64) if mask.dtype is torch.uint64 else mask.long()
    rule = draw(st.sampled_from(("arange", "count", "segments", "axes", "numbers")))
    match rule:
        case "arange":
            made = torch.arange(length)
        case "count":
            made = running_count(signed, padding)
        case "segments":
            made = segment_positions(signed, padding) if mask.numel() else signed
        case "axes":
            count = running_count(signed, padding)
            made = torch.stack([count, count // 3, count % 3])
        case _:
            made = tensor_of(draw(rows(length, "numbers")), torch.int64, (length,))
    return made.to(draw(st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8))))


@st.composite
def microbatches(draw: st.DrawFn) -> MicrobatchMetadata:
    """Draw any of the tensors, in any order."""
    tensors: dict[str, torch.Tensor] = {}
    mask = draw(st.none() | masks())
    if mask is not None:
        tensors["attention_mask"] = mask
        if draw(st.booleans()):
            tensors["position_ids"] = draw(positions(mask))
    counts = draw(st.lists(st.integers(0, 5), max_size=4))
    if counts:
        tensors["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        tensors["num_images"] = torch.tensor(counts)
        grids = [[1, 2 * count, 3 * count] for count in counts]
        tensors["image_grid_thw"] = torch.tensor(grids)
        tensors["video_grid_thw"] = torch.empty(0, 3, dtype=torch.int64)
    names = draw(st.permutations(sorted(tensors)))
    hop = (TensorSpec((2, 5, 8), torch.bfloat16, True), TensorSpec((3,), torch.bool))
    hops = draw(
        st.sampled_from(
            (
                (),
                (hop,),
                (hop, ()),
                ((TensorSpec((4, 8), torch.float32, order=(1, 0)), TensorSpec((4, 8), torch.int8, shard=1)),),
            )
        )
    )
    identity = draw(st.integers(-(2**63), 2**63 - 1))
    return MicrobatchMetadata(identity, hops, {name: tensors[name] for name in names})


@st.composite
def messages(draw: st.DrawFn) -> StepMessage:
    return StepMessage(
        draw(st.sampled_from(("step", "eval"))),
        draw(st.text(max_size=5)),
        draw(st.text(max_size=5)),
        draw(st.none() | st.just("torch.bfloat16")),
        tuple(draw(st.lists(microbatches(), max_size=4))),
    )


def step(*microbatches: MicrobatchMetadata) -> StepMessage:
    return StepMessage("step", "digest", "setting", None, microbatches)


def alone(**tensors: torch.Tensor) -> StepMessage:
    """Return a step of one microbatch with these tensors."""
    return step(MicrobatchMetadata(0, (), tensors))


def opened(data: torch.Tensor, device: str = "cpu") -> StepMessage:
    message = unpack(data, device)
    assert isinstance(message, StepMessage)
    return message


def assert_same(expected: StepMessage, got: StepMessage) -> None:
    """Compare bit for bit, including dtype and shape."""
    assert vars(expected) | {"microbatches": ()} == vars(got) | {"microbatches": ()}
    assert len(expected.microbatches) == len(got.microbatches)
    for want, have in zip(expected.microbatches, got.microbatches, strict=True):
        assert (want.id, want.hops) == (have.id, have.hops)
        assert set(want.tensors) == set(have.tensors)
        for name, tensor in want.tensors.items():
            same_tensor(tensor, have.tensors[name])


def same_tensor(expected: torch.Tensor, got: torch.Tensor) -> None:
    assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
    assert got.is_contiguous()
    flat = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, got)]
    assert torch.equal(*flat)
