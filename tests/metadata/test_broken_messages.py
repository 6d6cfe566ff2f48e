"""Anything that is not a message is a clear error: never a crash, a read past the end or a huge allocation."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masks import alone, messages

from ldt.errors import LdtError, MetadataError
from ldt.runtime.step.metadata import StepCalledOff, StepMessage, pack, unpack
from ldt.testing import in_time

MAX_ELEMENTS = 1 << 16
MASK = alone(attention_mask=torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))


def message_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def framed(kind: int, *body: int) -> torch.Tensor:
    assert len(body) < 128
    return message_of(*b"LDTM", 1, kind, len(body), *body)


def one_mask(dtype: int, sizes: list[int], *rows: int) -> torch.Tensor:
    """A step with one attention_mask whose sizes and rows are given as bytes."""
    return framed(0, 0, 0, 0, 0, 1, 1, 0, dtype, len(sizes), *sizes, 2, 0, 1, 0, *rows)


def error_of(data: torch.Tensor) -> str:
    with pytest.raises(MetadataError) as caught:
        unpack(data)
    return str(caught.value)


@given(messages(), st.data())
def test_mutations_end_in_an_error_or_in_another_message(message: StepMessage, data: st.DataObject) -> None:
    mutated = pack(message).tolist()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(mutated)))
        mutated[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        result = unpack(torch.tensor(mutated, dtype=torch.uint8), max_elements=MAX_ELEMENTS)
    except MetadataError:
        return
    assert isinstance(result, StepMessage | StepCalledOff)


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_header(body: bytes) -> None:
    data = [*b"LDTM", 1, 0, len(body) & 0x7F | (0x80 if len(body) > 127 else 0)]
    data += [len(body) >> 7] if len(body) > 127 else []
    try:
        unpack(torch.tensor([*data, *body], dtype=torch.uint8), max_elements=MAX_ELEMENTS)
    except LdtError as error:
        assert isinstance(error, MetadataError)  # noqa: PT017


def test_every_prefix_is_cut_short() -> None:
    data = pack(MASK)
    for length in range(len(data)):
        assert error_of(data[:length])
    assert "cut short" in error_of(data[:-1])


def test_more_bytes_than_there_should_be() -> None:
    assert "followed by other bytes" in error_of(torch.cat([pack(MASK), message_of(0)]))
    assert "bytes follow" in error_of(framed(0, 0, 0, 0, 0, 0, 0, 0))


def test_headers_of_something_else() -> None:
    data = pack(MASK)
    other = data.clone()
    other[4] = 9
    assert error_of(other) == (
        "expected a metadata message of version 1, got version 9; install the same version of ldt on all ranks"
    )
    other = data.clone()
    other[0] = 0
    assert "begins with LDTM" in error_of(other)
    other = data.clone()
    other[5] = 3
    assert "kind below 3, got 3" in error_of(other)


@pytest.mark.parametrize(
    "data",
    [
        pack(MASK).view(1, -1),
        pack(MASK).to(torch.int64),
        pack(MASK).repeat_interleave(2)[::2],
        torch.tensor(1),
    ],
    ids=["two dimensions", "another type", "strided", "scalar"],
)
def test_what_is_no_byte_string(data: torch.Tensor) -> None:
    assert "contiguous uint8 tensor" in error_of(data)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((11,), "code of a row below 11"),
        ((1, 5), "padding of at most 4"),
        ((3, 2, 3), "padding of at most 2"),
        ((4, 0, 2, 0, 1), "at least 1 element"),
        ((4, 0, 1, 5), "segment's length of at most 4"),
        ((4, 0, 9, 1), "number of segments"),
        ((5, 0x1F), "bits past its end"),
        ((6, 0, 0), "runs of at least 1 element"),
        ((6, 5, 0, 0), "run's length of at most 4"),
        ((7, 0, 0, 0), "needs 4 bytes"),
        ((7, 0x80, 0, 0, 0), "shortest form"),
        ((8,), "attention_mask has the code 8"),
        ((9, 0), "attention_mask has the code 9"),
        ((10, 0), "attention_mask has the code 10"),
        ((0, 0), "bytes follow"),
        ((), "1 rows, but only 0 bytes"),
    ],
)
def test_rows_that_cannot_be(rows: tuple[int, ...], expected: str) -> None:
    assert expected in error_of(one_mask(8, [4], *rows))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (0, (4, 0, 2, 1, 1)),
        (0, (7, 4, 0, 0, 0)),
        (2, (6, 4, 126, 126)),
        (1, (6, 4, 1, 0)),
        (2, (7, 0, 0, 0, 0x80, 2)),
    ],
    ids=["bool segments", "bool integers", "int8 run", "uint8 negative", "int8 integers"],
)
def test_elements_that_the_type_cannot_hold(dtype: int, rows: tuple[int, ...]) -> None:
    assert "can hold" in error_of(one_mask(dtype, [4], *rows))


def test_positions_without_a_mask_of_their_length() -> None:
    alone_ = framed(0, 0, 0, 0, 0, 1, 1, 1, 8, 1, 4, 2, 0, 1, 0, 9, 0)
    assert "follows a mask, but the microbatch has none" in error_of(alone_)


@pytest.mark.parametrize("code", [0, 1, 4, 5, 9, 10])
def test_codes_of_masks_and_positions_are_for_them_alone(code: int) -> None:
    lengths = framed(0, 0, 0, 0, 0, 1, 1, 2, 8, 1, 4, 2, 0, 1, 0, code, 1)
    assert f"cu_seqlens has the code {code}" in error_of(lengths)


def test_tensors_in_another_order_or_twice() -> None:
    twice = framed(0, 0, 0, 0, 0, 1, 1, 0, 8, 1, 4, 2, 0, 2, 0, 0, 0, 0)
    assert "once, in the order of names" in error_of(twice)


@pytest.mark.parametrize(
    "sizes",
    [
        [0x80, 0x80, 0x80, 0x80, 0x80, 0x20],  # 2^40
        [0xFF] * 8 + [0x7F],
        [0xFF] * 9 + [0x7F],
    ],
)
def test_a_few_bytes_cannot_ask_for_much(sizes: list[int]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    data = framed(0, 0, 0, 0, 0, 1, 1, 0, 8, 1, *sizes, 2, 0, 1, 0, 0)
    with pytest.raises(MetadataError):
        unpack(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert in_time(time.perf_counter() - start, 1)


def test_segments_count_where_a_mask_of_few_bytes_has_many() -> None:
    # A mask 1, 2, 3, ... is one run with as many segments as elements; positions that follow it need all of them.
    length = [0x80, 0x80, 0x40]  # 2^20
    body = [0, 0, 0, 0, 2, 1, 0, 8, 1, *length, 1, 8, 1, *length, 2, 0, 2, 0, 1, 6, *length, 2, 2, 10, 0]
    data = framed(0, *body)
    assert isinstance(unpack(data, max_elements=6 << 20), StepMessage)
    with pytest.raises(MetadataError, match="a rule over a mask of runs asks for more"):
        unpack(data, max_elements=5 << 20)


@pytest.mark.parametrize("count", range(3))
def test_counts_that_the_rest_cannot_hold(count: int) -> None:
    body = [0, 0, 0, *(100 if index == count else 0 for index in range(3))]
    assert "is 100, but only" in error_of(framed(0, *body))


def test_texts_that_are_no_text() -> None:
    for broken in ([0xFF], [0xC0, 0x80], [0xED, 0xA0, 0x80], [0xF4, 0x90, 0x80, 0x80], [0xE2, 0x82]):
        assert "is not UTF-8" in error_of(framed(0, len(broken), *broken, 0, 0, 0, 0, 0))


def test_hops_that_cannot_be() -> None:
    def hop(*tensor: int) -> str:
        return error_of(framed(0, 0, 0, 0, 1, 0, 0, 1, *tensor))

    assert "data type below 24" in hop(24, 0, 0)
    assert "flags of 0 to 7" in hop(8, 8, 0)
    assert "dimensions of at most 64" in hop(8, 0, 65)
    assert "names each of 2 dimensions once" in hop(8, 2, 2, 3, 4, 1, 1)
    assert "split dimension below 2 and the usual order, got 2" in hop(8, 4, 2, 3, 4, 2)
    assert "usual order, got 1 and an order of 2" in hop(8, 6, 2, 3, 4, 1, 0, 1)
    assert "2^63 bytes" in hop(8, 0, 2, *[0xFF] * 4, 0x7F, *[0xFF] * 4, 0x7F)
