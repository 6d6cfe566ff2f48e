"""Computes digests of tensors on their own device; equal bits give equal digests on any kind of device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ldt._torch_private import is_traceable_wrapper_subclass
from ldt.runtime.control.collectives import as_bytes
from ldt.runtime.model.module_state import unwrapped_tensors

__all__ = ["components", "digests", "raw_bytes"]

_WORD = 8  # bytes
_PIECE = 1 << 20  # words multiplied at once; the product takes the same memory again
_SMALL = 1 << 16  # a CPU tensor of fewer bytes is hashed directly: one call instead of ten
# As int64. With odd weights, one differing word changes the sum.
_ODD_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return 16 hexadecimal digits per tensor, of the local shard of a DTensor.

    The digest is a weighted integer sum of the bits, so NaN equals NaN and the order of summation does not matter. A
    tensor without memory contributes nothing. Copies one number per 8 MiB from a device, all in one transfer.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums = [list(_sums(tensor, weights)) for tensor in tensors]
    numbers = iter(_read([number for of_one in sums for number in of_one]))
    return [_hash(repr([next(numbers) for _ in of_one]).encode()) for of_one in sums]


def components(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain strided tensors that store this rank's part of ``tensor``; none if it has no memory yet."""
    if is_lazy(tensor) or tensor.is_meta:
        return
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        yield from components(tensor.to_local())
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    elif is_traceable_wrapper_subclass(tensor):
        for part in unwrapped_tensors(tensor):
            yield from components(part)
    elif tensor.is_nested:
        for part in tensor.unbind():
            yield from components(part)
    elif tensor.is_quantized:
        yield from (tensor.int_repr(), *_scales(tensor))
    else:
        yield tensor if tensor.layout is torch.strided else tensor.to_dense()


def _scales(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64),)
    return (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided ``tensor`` in element order, as uint8; a view where possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _sums(tensor: torch.Tensor, weights: dict[torch.device, torch.Tensor]) -> Iterator[torch.Tensor | str]:
    for part in components(tensor):
        raw = raw_bytes(part)
        if raw.device.type == "cpu" and raw.numel() < _SMALL:
            yield _hash(as_bytes(raw))
            continue
        if raw.storage_offset() % _WORD:
            raw = raw.clone()
        whole = raw.numel() // _WORD * _WORD
        for piece in (*torch.split(raw[:whole].view(torch.int64), _PIECE), raw[whole:].long()):
            if piece.numel():
                yield (piece * _weights_for(piece, weights)).sum()


def _weights_for(piece: torch.Tensor, made: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    size, device = piece.numel(), piece.device
    if device not in made or made[device].numel() < size:
        made[device] = torch.arange(1, 1 + size, device=device).mul_(_ODD_FACTOR).bitwise_or_(1)
    return made[device][:size]


def _read(numbers: Sequence[torch.Tensor | str]) -> list[int | str]:
    """Copy the numbers to the host, with one wait per device."""
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    found: list[Any] = list(numbers)
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, {})[index] = number
    for tensors in by_device.values():
        for index, value in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True):
            found[index] = value
    return found


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
