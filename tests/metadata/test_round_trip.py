"""Packed metadata is rebuilt bit-equal, and regular metadata takes a few bytes."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masks import (
    ROW_KINDS,
    alone,
    assert_same,
    masks,
    messages,
    opened,
    positions,
    running_count,
    same_tensor,
    segment_positions,
    step,
)

from ldt.errors import MetadataError
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.step.metadata import (
    METADATA_NAMES,
    MicrobatchMetadata,
    StepCalledOff,
    StepMessage,
    pack,
    unpack,
)


def row_bytes(name: str, row: torch.Tensor, **others: torch.Tensor) -> int:
    """Return the bytes that one more row takes."""
    two = {key: value.expand(2, -1) for key, value in others.items()}
    one = {key: value.expand(1, -1) for key, value in others.items()}
    long = pack(alone(**two, **{name: row.expand(2, -1)}))
    short = pack(alone(**one, **{name: row.expand(1, -1)}))
    return len(long) - len(short)


@given(messages())
def test_any_message(message: StepMessage) -> None:
    data = pack(message)
    assert_same(message, opened(data))
    assert torch.equal(data, pack(opened(data)))


@given(messages())
def test_on_the_meta_device_tensors_have_the_same_specs(message: StepMessage) -> None:
    data = pack(message)
    for with_elements, without in zip(
        opened(data).microbatches, opened(data, "meta").microbatches, strict=True
    ):
        assert (with_elements.id, with_elements.hops) == (without.id, without.hops)
        assert all(tensor.is_meta for tensor in without.tensors.values())
        assert specs_by_name(with_elements) == specs_by_name(without)


def specs_by_name(microbatch: MicrobatchMetadata) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in microbatch.tensors.items()}


def test_a_name_is_its_text() -> None:
    """Compared by value: of most names Python has one object only."""
    mask = torch.ones(2, 3, dtype=torch.int64)
    other = "".join(["attention", "_mask"])
    assert torch.equal(pack(alone(**{other: mask})), pack(alone(attention_mask=mask)))


@pytest.mark.parametrize("kind", ROW_KINDS)
@given(data=st.data())
def test_masks_of_each_kind(kind: str, data: st.DataObject) -> None:
    mask = data.draw(masks(kind, max_length=1200))
    tensors = {"attention_mask": mask, "position_ids": data.draw(positions(mask))}
    assert_same(alone(**tensors), opened(pack(alone(**tensors))))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1] * 300, 1),
        ([0] * 5 + [1] * 295, 2),
        ([1] * 100 + [0] * 200, 3),
        ([0] * 9 + [1] * 286 + [0] * 5, 3),
        ([0] * 300, 3),
        ([1] * 100 + [0] + [1] * 199, 1 + 3 + 3 + 4),  # runs: ones; a zero and a one, rising; ones
        ([1, 0, 0, 1, 1, 0, 1, 0] * 20, 1 + 20),  # bits
        ([0, 1, 0], 2),  # bits again: two counts would take 3
    ],
    ids=["none", "left", "right", "both", "empty", "one hole", "many holes", "short"],
)
def test_a_row_takes_the_shortest_code(dtype: torch.dtype, row: list[int], expected: int) -> None:
    assert row_bytes("attention_mask", torch.tensor(row).to(dtype)) == expected


def test_packed_rows_take_a_length_per_segment() -> None:
    lengths = torch.tensor([60, 50, 100, 40])
    packed = torch.cat(
        [torch.zeros(20), torch.repeat_interleave(torch.arange(1, 5), lengths), torch.zeros(30)]
    )
    mask = packed.long()
    assert row_bytes("attention_mask", mask) == 1 + 1 + 1 + 4
    # Positions add their code and their padding.
    for made in (running_count(mask, 1), segment_positions(mask, 1)):
        both = row_bytes("position_ids", made, attention_mask=mask)
        assert both == 7 + 2


def test_a_step_of_64_microbatches_is_short() -> None:
    hop = (TensorSpec((4, 4096, 2048), torch.bfloat16, True),)
    mask = torch.ones(4, 4096, dtype=torch.int64)
    mask[:, :100] = 0
    tensors = {"attention_mask": mask, "position_ids": running_count(mask, 1)}
    one, many = (
        len(pack(step(*(MicrobatchMetadata(index, (hop,), tensors) for index in range(count)))))
        for count in (1, 65)
    )
    # id, hop and its number, two tensors and their numbers; a code and a count per row
    assert many - one <= 64 * (6 + 4 * 2 + 4 * 2) + 1


def test_positions_follow_the_mask_of_their_own_microbatch() -> None:
    masks_ = [torch.tensor([[0, 1, 1, 0]]), torch.tensor([[1, 1, 0, 0]])]
    message = step(
        *(
            MicrobatchMetadata(index, (), {"position_ids": running_count(mask, 9), "attention_mask": mask})
            for index, mask in enumerate(masks_)
        )
    )
    assert_same(message, opened(pack(message)))


@pytest.mark.parametrize("mode", ["step", "eval"])
def test_calls(mode: str) -> None:
    for autocast in (None, "", "torch.bfloat16"):
        message = StepMessage(mode, "plan", "sétting", autocast, ())  # type: ignore[arg-type]
        assert opened(pack(message)) == message


def test_a_step_that_is_called_off() -> None:
    message = StepCalledOff("KeyError", "no such file: 'ä'")
    assert unpack(pack(message)) == message
    odd = unpack(pack(StepCalledOff("OSError", "bad name \udcff")))
    assert odd == StepCalledOff("OSError", "bad name \\udcff")


def test_every_dtype_of_a_hop() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # Quantized dtypes, those of a few bits and torch 2.14's complex bfloat16 are not part of the format.
    odd = re.compile(r"torch\.(q|bits[^0-9]|bits\dx|u?int\d$|bcomplex32)")
    known = [dtype for dtype in dtypes if not odd.match(str(dtype)) or dtype in (torch.int8, torch.uint8)]
    assert len(known) == 24
    for dtype in sorted(known, key=str):
        specs = (TensorSpec((3, 0, 2**40), dtype, True, (2, 0, 1)), TensorSpec((), dtype))
        message = step(MicrobatchMetadata(5, (specs, ()), {}))
        assert opened(pack(message)).microbatches[0].hops == (specs, ())
    for dtype in dtypes.difference(known):
        with pytest.raises(MetadataError, match=f"got {str(dtype).removeprefix('torch.')}; convert"):
            pack(step(MicrobatchMetadata(5, ((TensorSpec((3,), dtype),),), {})))


def test_views_are_packed_by_their_elements() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    for view in (mask.t(), mask[:, ::2], mask[:1].expand(4, -1), mask[1:]):
        got = opened(pack(alone(attention_mask=view))).microbatches[0].tensors
        same_tensor(view.contiguous(), got["attention_mask"])


def test_rebuilt_tensors_are_apart() -> None:
    mask = torch.ones(2, 5, dtype=torch.int64)
    tensors = (
        opened(pack(alone(attention_mask=mask, num_images=torch.tensor([1, 1])))).microbatches[0].tensors
    )
    tensors["attention_mask"].zero_()
    assert tensors["num_images"].tolist() == [1, 1]


def test_any_mapping_and_any_mode_of_autograd() -> None:
    mask = torch.tensor([[0, 1, 1]])
    message = step(MicrobatchMetadata(0, (), MappingProxyType({"attention_mask": mask})))
    with torch.inference_mode():
        data = pack(message)
        assert_same(message, opened(data))
    weight = torch.ones(3, requires_grad=True)
    (weight * opened(data).microbatches[0].tensors["attention_mask"]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 1]


def test_threads_pack_side_by_side() -> None:
    message = alone(attention_mask=torch.tensor([[0, 1, 1, 0, 1]] * 50))
    data = pack(message)
    with ThreadPoolExecutor(4) as threads:
        for packed in threads.map(lambda _: pack(opened(data)), range(200)):
            assert torch.equal(packed, data)


def refused(tensor: object, name: str = "attention_mask") -> str:
    with pytest.raises(MetadataError) as caught:
        pack(step(MicrobatchMetadata(3, (), {name: tensor})))  # type: ignore[dict-item]
    return str(caught.value)


def test_what_may_not_cross_is_refused_by_name() -> None:
    assert "microbatch 3, tensor 'attention_mask'" in refused(torch.ones(2, 3))
    assert "float32" in refused(torch.ones(2, 3))
    assert "'attention_mask'" in refused(torch.ones(2, 3, dtype=torch.int64).to_sparse())
    assert "'input_ids' may not leave the edge" in refused(torch.ones(2, 3, dtype=torch.int64), "input_ids")
    assert "image_grid_thw" in refused(torch.ones(2, 4, dtype=torch.int64), "image_grid_thw")
    assert "cu_seqlens" in refused(torch.ones(2, 4, dtype=torch.int64), "cu_seqlens")
    assert "expected a tensor as 'num_images'" in refused(3, "num_images")
    assert set(METADATA_NAMES) >= {
        "attention_mask",
        "position_ids",
        "cu_seqlens",
        "image_grid_thw",
        "video_grid_thw",
    }


def test_a_bool_that_is_neither_is_refused() -> None:
    assert "a bool is 0 or 1" in refused(torch.tensor([1, 2, 0], dtype=torch.uint8).view(torch.bool))


def test_more_elements_than_allowed_are_refused_by_both_sides() -> None:
    message = alone(attention_mask=torch.ones(4, 8, dtype=torch.int64))
    with pytest.raises(MetadataError, match="raise max_elements"):
        pack(message, max_elements=31)
    data = pack(message, max_elements=32)
    assert_same(message, opened(data))
    with pytest.raises(MetadataError, match=r"attention_mask: int64\[4, 8\] asks for more than the 31"):
        unpack(data, max_elements=31)
    huge = torch.ones(1, dtype=torch.int64).expand(2**40, 1)
    assert "asks for more" in refused(huge)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(MetadataError, match="expected mode"):
        pack(StepMessage("train", "", "", None, ()))  # type: ignore[arg-type]
