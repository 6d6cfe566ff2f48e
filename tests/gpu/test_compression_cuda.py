"""The 8 bit format on a GPU: the bytes, and what is unpacked, equal those of the CPU."""

from __future__ import annotations

import pytest
import torch

from ldt._C import has_8bit_kernels, pack_8bit, unpack_8bit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def random_bits(size: int, dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    """Numbers of all magnitudes, with NaN of any sign and payload, infinities, denormals and zeros."""
    exponents = torch.empty(size, dtype=torch.float64).uniform_(low, high)
    tensor = (torch.randint(-1, 2, (size,)) * 2.0**exponents).to(dtype)
    bits = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    where = torch.arange(size) % 97 == 5
    bits[where] = torch.randint(-(2**15), 2**15, (int(where.sum()),)).to(bits.dtype) << (
        8 * dtype.itemsize - 16
    )
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 100_003, 20_000_000])
@pytest.mark.parametrize(("low", "high"), [(-150, -120), (-24, 15), (-20, 128)])
def test_bytes_and_elements_are_those_of_the_cpu(dtype: torch.dtype, size: int, low: int, high: int) -> None:
    assert has_8bit_kernels(torch.device("cuda"))
    tensor = random_bits(size, dtype, low, high)
    packed = pack_8bit(tensor)
    on_device = pack_8bit(tensor.cuda())
    assert torch.equal(on_device.cpu(), packed)
    expected, found = torch.empty_like(tensor), torch.empty_like(tensor, device="cuda")
    unpack_8bit(packed, expected)
    unpack_8bit(on_device, found)
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert torch.equal(found.cpu().view(whole), expected.view(whole))


def test_a_view_at_any_address_is_unpacked() -> None:
    tensor = torch.randn(1000)
    memory = torch.zeros(4000, dtype=torch.uint8, device="cuda")
    for start in (1, 2, 3, 7):
        packed = memory[start : start + 1016]
        packed.copy_(pack_8bit(tensor.cuda()))
        found, expected = torch.empty(1000, device="cuda"), torch.empty(1000)
        unpack_8bit(packed, found)
        unpack_8bit(pack_8bit(tensor), expected)
        assert torch.equal(found.cpu(), expected)
