"""Draws random numbers that depend only on a seed and a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["drawn_by_name", "seed_by_name"]


@contextmanager
def drawn_by_name(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of ``device`` by ``seed`` and ``name``. Their states are restored at the end.

    The host does not wait for the device.
    """
    devices = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type):
        seed_by_name(seed, name, device)
        yield


def seed_by_name(seed: int, name: str, device: torch.device) -> None:
    """As ``drawn_by_name``, but for good."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    # Not torch.manual_seed, which would also seed all other accelerators.
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).default_generators[device.index].manual_seed(number)
