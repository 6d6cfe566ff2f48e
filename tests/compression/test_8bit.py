"""The 8 bit format: its bytes, its error bound for each block, and what is not a number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ldt._C import has_8bit_kernels, pack_8bit, unpack_8bit

BLOCK = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INFINITY = math.inf
SIZES = (0, 1, 2, 127, 128, 129, 255, 256, 1000)


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    unpacked = torch.empty(tensor.shape, dtype=tensor.dtype)
    unpack_8bit(pack_8bit(tensor), unpacked)
    return unpacked


def exponents_of(packed: torch.Tensor, elements: int) -> torch.Tensor:
    return packed[elements:].clone().view(torch.int16)


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """The finite elements in float64, those of a block in a row; zeros fill the last."""
    flat = torch.nan_to_num(tensor.double().reshape(-1), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of finite elements that are nowhere near the largest of their type, by torch's casts."""
    blocks = blocks_of(tensor)
    largest = blocks.abs().amax(1)
    exponents = torch.ceil(torch.log2(largest / 448)).clamp(min=-140)
    exponents = torch.where(largest > 448 * 2.0**exponents, exponents + 1, exponents)  # log2 is rounded
    exponents = torch.where(largest <= 448 * 2.0 ** (exponents - 1), exponents - 1, exponents).clamp(min=-140)
    exponents = torch.where(largest == 0, torch.zeros_like(exponents), exponents)
    scaled = (blocks / 2.0 ** exponents[:, None]).float()
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1)[: tensor.numel()]
    codes = torch.where(codes == 0x80, torch.zeros_like(codes), codes)
    return torch.cat([codes, exponents.to(torch.int16).view(torch.uint8)])


def assert_within_bound(tensor: torch.Tensor) -> None:
    """What the docstring of pack_8bit promises, of each block."""
    unpacked = round_trip(tensor)
    assert torch.equal(unpacked.isfinite(), tensor.isfinite())
    blocks, found = blocks_of(tensor), blocks_of(unpacked)
    bound = torch.maximum(blocks.abs() / 16, blocks.abs().amax(1, keepdim=True) / 229376)
    assert ((found - blocks).abs() <= bound).all()


def random_tensor(size: int, dtype: torch.dtype, low: int, high: int, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes from 2^low to 2^high, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(size, dtype=torch.float64).uniform_(low, high, generator=generator)
    signs = torch.randint(-3, 4, (size,), generator=generator).sign()
    return (signs * 2.0**exponents).to(dtype)


@given(
    size=st.integers(0, 600),
    dtype=st.sampled_from(DTYPES),
    ends=st.tuples(st.integers(-150, 127), st.integers(-150, 127)),
    seed=st.integers(0, 2**31),
)
def test_elements_are_within_the_bound_of_their_block(
    size: int, dtype: torch.dtype, ends: tuple[int, int], seed: int
) -> None:
    low, high = sorted(ends)
    tensor = random_tensor(size, dtype, low, high, seed)
    assert_within_bound(tensor)


@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=300),
    dtype=st.sampled_from(DTYPES),
)
def test_any_floats_are_within_the_bound(values: list[float], dtype: torch.dtype) -> None:
    assert_within_bound(torch.tensor(values, dtype=torch.float32).to(dtype))


@given(
    size=st.integers(0, 600), low=st.integers(-149, 100), width=st.integers(0, 40), seed=st.integers(0, 999)
)
def test_bytes_are_those_of_torch_casts(size: int, low: int, width: int, seed: int) -> None:
    tensor = random_tensor(size, torch.float32, low, min(low + width, 120), seed)
    assert pack_8bit(tensor).tolist() == reference(tensor).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_float_survives_a_block_of_its_own(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    tensor = torch.zeros(2**16, BLOCK, dtype=dtype)
    tensor[:, 5] = numbers if dtype == torch.float16 else numbers.view(torch.int16).view(torch.bfloat16)
    assert_within_bound(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_elements_have_the_codes_of_the_same_float32(dtype: torch.dtype) -> None:
    """Every finite element, with and without zeros, in blocks with every largest element that it can be next to."""
    every = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(dtype)
    below_top = 240.0 * 2.0 ** (8 if dtype == torch.float16 else 120)  # above it the top code differs
    every = every[every.isfinite() & (every < below_top)]
    runs = every[: every.numel() // 64 * 64].view(-1, 64)  # half a block of adjacent magnitudes
    for higher in range(0, 12):  # binades between these and the largest element
        largest = (runs[:, -1].double() * 2.0**higher).clamp(max=float(every[-1])).to(dtype)
        for filler in (0, 1):
            blocks = torch.cat([runs, filler * largest[:, None].expand(-1, 64)], 1)
            blocks[:, 1::3].neg_()
            blocks[:, 64] = largest
            packed = pack_8bit(blocks)
            assert torch.equal(packed, pack_8bit(blocks.float()))
            unpacked, widened = torch.empty_like(blocks), torch.empty(blocks.shape)
            unpack_8bit(packed, unpacked)
            unpack_8bit(packed, widened)
            assert torch.equal(unpacked.view(torch.int16), widened.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_elements_of_any_codes_are_those_of_float32(dtype: torch.dtype) -> None:
    """Blocks of one code and its neighbours, with every exponent at which all are finite in the type."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(-1, 1)
    each = torch.cat([codes.expand(256, 64), codes.expand(256, 64).flip(0)], 1).contiguous()
    for exponent in range(-140, 7 if dtype == torch.float16 else 120):
        exponents = torch.full((256,), exponent, dtype=torch.int16).view(torch.uint8)
        for blocks in (each, codes.expand(256, 128)):
            packed = torch.cat([blocks.reshape(-1), exponents])
            unpacked, widened = torch.empty(256 * 128, dtype=dtype), torch.empty(256 * 128)
            unpack_8bit(packed, unpacked)
            unpack_8bit(packed, widened)
            exact = widened.to(dtype).double() == widened.double()  # what packing can have made
            assert torch.equal(unpacked[exact], widened.to(dtype)[exact])
            assert torch.equal(unpacked.isnan(), widened.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest, -largest, largest / 2, 1.0], dtype=dtype)
    assert_within_bound(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_numbers_are_exact_in_their_type(dtype: torch.dtype) -> None:
    """Packing what was unpacked changes nothing, so a tensor that crosses two hops is rounded once."""
    tensor = random_tensor(5000, dtype, -24, 15, seed=3)
    once = round_trip(tensor)
    assert torch.equal(round_trip(once), once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_nan_and_infinities_arrive_and_leave_the_others_alone(dtype: torch.dtype, size: int) -> None:
    tensor = random_tensor(size, dtype, -4, 4, seed=1)
    special = [INFINITY, -INFINITY, math.nan, -math.nan]
    expected = round_trip(tensor)
    for index in range(0, size, 5):
        expected[index] = tensor[index] = special[index % 4]
    found = round_trip(tensor)
    assert torch.equal(found.isnan(), tensor.isnan())
    assert torch.equal(found[tensor.isinf()], tensor[tensor.isinf()])
    blocks = blocks_of(tensor)
    bound = torch.maximum(blocks.abs() / 16, blocks.abs().amax(1, keepdim=True) / 229376)
    assert ((blocks_of(found) - blocks).abs() <= bound).all()


def test_a_block_without_finite_elements() -> None:
    tensor = torch.tensor([INFINITY, -INFINITY, math.nan] * 50)
    assert torch.equal(round_trip(tensor).nan_to_num(7), tensor.nan_to_num(7))


@pytest.mark.parametrize("value", [1e-8, -1e-8, 1e-40, 2.0**-149, 3.4e38, 1.0])
def test_small_and_large_blocks_keep_their_precision(value: float) -> None:
    found = round_trip(torch.full((200,), value))
    assert ((found - value).abs() <= abs(value) / 16).all()
    assert (found != 0).all()


def test_zeros_stay_zeros() -> None:
    for tensor in (torch.zeros(300), -torch.zeros(300), torch.tensor([-0.0, 5.0, -1e-30])):
        assert torch.equal(round_trip(tensor) == 0, tensor.abs() < 1e-20)
        assert not torch.signbit(round_trip(tensor)[tensor == 0]).any()


def test_channels_that_are_300_times_the_others_cost_them_little() -> None:
    tensor = torch.randn(500, 1024, generator=torch.Generator().manual_seed(0))
    outliers = torch.zeros(1024, dtype=torch.bool)
    outliers[[3, 700]] = True
    tensor[:, outliers] *= 300
    error = (round_trip(tensor) - tensor)[:, ~outliers].norm() / tensor[:, ~outliers].norm()
    assert error <= 0.03
    assert pack_8bit(tensor).numel() <= 0.26 * 4 * tensor.numel()


@pytest.mark.parametrize("size", SIZES)
def test_a_message_has_a_code_per_element_and_two_bytes_per_block(size: int) -> None:
    packed = pack_8bit(torch.randn(size))
    assert packed.dtype == torch.uint8
    assert packed.shape == (size + 2 * -(-size // BLOCK),)


def test_elements_are_those_of_a_contiguous_tensor() -> None:
    tensor = torch.randn(48, 32)
    assert torch.equal(pack_8bit(tensor.t()), pack_8bit(tensor.t().contiguous()))


def test_equal_tensors_give_equal_bytes_at_any_address() -> None:
    memory = torch.randn(4001)
    for start in range(1, 9):
        part = memory[start : start + 3000]
        assert torch.equal(pack_8bit(part), pack_8bit(part.clone()))


def test_exponents_from_a_peer_are_bounded() -> None:
    packed = pack_8bit(torch.ones(BLOCK))
    for exponent in (-(2**15), -141, 121, 2**15 - 1):
        packed[BLOCK:] = torch.tensor([exponent], dtype=torch.int16).view(torch.uint8)
        unpack_8bit(packed, torch.empty(BLOCK))
    unpack_8bit(torch.arange(130, dtype=torch.uint8), torch.empty(BLOCK, dtype=torch.float16))


def test_other_dtypes_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16, got float64"):
        pack_8bit(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected 5 bytes .* for float32\[3\], got uint8\[4\]"):
        unpack_8bit(torch.zeros(4, dtype=torch.uint8), torch.zeros(3))
    with pytest.raises(ValueError, match="no kernels"):
        pack_8bit(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        unpack_8bit(pack_8bit(torch.zeros(2, 3)), torch.zeros(3, 2).t())
    assert has_8bit_kernels(torch.device("cpu"))
    assert not has_8bit_kernels(torch.device("meta"))
