"""Short digests of what tensors hold, made where they are: equal bits give equal ones, on any kind of device."""

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
_PIECE = 1 << 20  # words that are multiplied at once, which takes as much memory again
_SMALL = 1 << 16  # bytes on the CPU that are hashed as they are, which takes a call instead of ten
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64: one word that differs changes a sum whose weights are odd


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """16 hexadecimal digits for each: of a DTensor, this rank's part; of one without memory, nothing.

    A weighted sum of its bits in whole numbers, so that NaN equals NaN and no order of sums matters. Reads a number for
    each 8 MiB from a device, all at once.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums = [list(_sums(tensor, weights)) for tensor in tensors]
    numbers = iter(_read([number for of_one in sums for number in of_one]))
    return [_hashed(repr([next(numbers) for _ in of_one]).encode()) for of_one in sums]


def components(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain strided tensors that hold what this rank has of ``tensor``; none where it has no memory yet."""
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
    """The bytes of a strided ``tensor`` in the order of its elements, uint8; a view where that can be."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _sums(tensor: torch.Tensor, weights: dict[torch.device, torch.Tensor]) -> Iterator[torch.Tensor | str]:
    for part in components(tensor):
        raw = raw_bytes(part)
        if raw.device.type == "cpu" and raw.numel() < _SMALL:
            yield _hashed(as_bytes(raw))
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
        made[device] = torch.arange(1, 1 + size, device=device).mul_(_ODD).bitwise_or_(1)
    return made[device][:size]


def _read(numbers: Sequence[torch.Tensor | str]) -> list[int | str]:
    """The numbers on the host, a wait for each device."""
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    found: list[Any] = list(numbers)
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, {})[index] = number
    for tensors in by_device.values():
        for index, value in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True):
            found[index] = value
    return found


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
