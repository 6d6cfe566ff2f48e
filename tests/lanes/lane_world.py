"""Lanes over new groups, and messages to send, for functions that run on the ranks of lane tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ldt._C import Lane, LaneError

SENDER, LEADER, MEMBER = 0, 1, 2
Message = list[torch.Tensor]


def fused_lane(*, chunk_bytes: int = 1 << 12, timeout: float | timedelta = 20.0) -> Lane:
    """Return a lane from rank 0 to a stage of ranks 1 (leader) and 2. Every rank of the world calls it."""
    p2p, stage = dist.new_group([SENDER, LEADER]), dist.new_group([LEADER, MEMBER])
    rank = dist.get_rank()
    return Lane(
        "fused",
        p2p=None if rank == MEMBER else p2p,
        stage=None if rank == SENDER else stage,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
    )


def pair_lane(*, chunk_bytes: int = 1 << 20, timeout: float = 20.0) -> Lane | None:
    """Return a lane between ranks 0 and 1; None on others. Every rank of the world calls it."""
    p2p = dist.new_group([SENDER, LEADER])
    if dist.get_rank() == MEMBER:
        return None
    return Lane(
        "pair",
        p2p=p2p,
        stage=None,
        chunk_bytes=chunk_bytes,
        timeout=timedelta(seconds=timeout),
    )


def launch(
    lane: Lane, message: Message, label: str = "", targets: Message | None = None
) -> tuple[dist.Work, Message]:
    """Send ``message`` on the sender, receive one like it elsewhere (into ``targets``, if given).

    Returns the work and the tensors to receive.
    """
    if dist.get_rank() == SENDER:
        return lane.send(message, LEADER, label), message
    if targets is None:
        targets = [lane.empty(tensor.shape, tensor.dtype) for tensor in message]
    return lane.recv(targets, SENDER, label), targets


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Cloned: contiguous() keeps the strides of a one-element tensor, and bits that a view negates.
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def error_of(call: Callable[[], Any], kind: type[BaseException] = LaneError) -> str:
    """Return the text of the error that ``call`` raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool,
           torch.complex64, torch.float8_e4m3fn, torch.uint16)  # fmt: skip


def random_message(seed: int) -> Message:
    """Return up to five tensors of any dtype, shape and memory layout, the same on every rank."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    return [_random_tensor(draw, generator) for _ in range(draw.randint(1, 5))]


def random_targets(message: Message, seed: int) -> Message:
    """Return targets to receive ``message`` into: plain and strided tensors, and views that conjugate or negate."""
    draw = random.Random(seed)
    plain = [torch.zeros([*tensor.shape, draw.choice((1, 2))], dtype=tensor.dtype) for tensor in message]
    return [_random_sign(draw, tensor[..., 0]) for tensor in plain]


def _random_sign(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a conjugate or negative view of it."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t]
    if tensor.is_complex():
        views += [torch.conj, torch._neg_view, lambda t: torch._neg_view(t.conj())]
    elif tensor.is_floating_point() and tensor.element_size() >= 2:
        views += [torch._neg_view]
    return draw.choice(views)(tensor)


def _random_tensor(draw: random.Random, generator: torch.Generator) -> torch.Tensor:
    shape = [draw.choice((0, 1, 2, 3, 7, 40)) for _ in range(draw.randint(0, 4))]
    tensor = torch.randint(-100, 100, shape, generator=generator).float().div(7).to(draw.choice(_DTYPES))
    if tensor.is_complex():
        tensor = tensor * (1 + 2j)
    layouts: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
        lambda t: t,
        lambda t: t.movedim(0, -1) if t.dim() else t,
        lambda t: t[..., ::2] if t.dim() else t,
        lambda t: t[3:] if t.dim() else t,
        lambda t: t[:1].expand(4, *t.shape[1:]) if t.dim() and t.shape[0] else t,
        lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    )
    return _random_sign(draw, draw.choice(layouts)(tensor))
