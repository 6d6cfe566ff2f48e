"""Selects the device of this rank: ``--device auto`` takes a GPU or an NPU if its host has one, else the CPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

__all__ = ["CPU", "Device", "add_device_options", "select_device"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_NAMES = {"cuda": "GPU", "npu": "NPU"}


class Device(NamedTuple):
    """Where this rank computes, and the backend of its lanes."""

    device: torch.device
    backend: str

    @property
    def backends(self) -> str:
        """Those of the default process group."""
        kind = self.device.type
        return self.backend if kind == "cpu" else f"cpu:gloo,{kind}:{self.backend}"

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        """Compute in ``dtype`` where autocast does; weights stay in float32."""
        return torch.autocast(self.device.type, _DTYPES[dtype], enabled=dtype != "float32")

    def put(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copy tensors of the host to the device. On a GPU the host does not wait for what is queued there."""
        if self.device.type != "cuda":
            return tuple(tensor.to(self.device) for tensor in tensors)
        pinned = (tensor.contiguous().pin_memory() for tensor in tensors)  # an expanded one cannot be pinned
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in pinned)


CPU = Device(torch.device("cpu"), _BACKENDS["cpu"])


def add_device_options(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    group.add_argument(
        "--device",
        choices=("auto", *_BACKENDS),
        default="auto",
        help="auto: GPUs or NPUs if this host has some, else the CPU",
    )
    group.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        default="float32",
        help="bfloat16: under autocast, weights in float32",
    )


def select_device(wanted: str) -> Device:
    """Select the device of this rank, make it the current one, and say once for each host which it is and why.

    Call it before CUDA starts. Raises ValueError if ``wanted`` is not "auto" and its devices cannot be used.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    why = "--device cpu"
    for kind in {"auto": ("cuda", "npu"), "cpu": ()}.get(wanted, (wanted,)):
        count = _count(kind)
        if count >= ranks or (count > 0 and kind == "cuda"):
            return _accelerator(kind, count, ranks)
        if wanted != "auto":
            raise ValueError(f"--device {kind}: {_missing(kind, count, ranks)}, or give --device cpu")
        why = _missing(kind, count, ranks) if count else f"PyTorch {torch.__version__} sees no GPU or NPU"
    torch.set_num_threads(1)  # one core for each process
    _say(f"runs on the CPU: {why}")
    return CPU


def _count(kind: str) -> int:
    """Return how many devices of ``kind`` this process sees."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this PyTorch does not know it
        return 0
    return int(module.device_count()) if module.is_available() else 0


def _missing(kind: str, count: int, ranks: int) -> str:
    """Say which devices are missing, and what to do."""
    if count > 0:
        return (
            f"HCCL needs an NPU for each rank, got {count} for {ranks} ranks: start at most {count} on a host"
        )
    needed, variable = {
        "cuda": ("a build for CUDA", "CUDA_VISIBLE_DEVICES"),
        "npu": ("torch_npu", "ASCEND_RT_VISIBLE_DEVICES"),
    }[kind]
    return (
        f"PyTorch {torch.__version__} sees no {_NAMES[kind]}: install {needed} and a driver, check {variable}"
    )


def _accelerator(kind: str, count: int, ranks: int) -> Device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local_rank % count)
    reason = f"runs on {_NAMES[kind]}s, one for each rank: this host has {count}"
    if count < ranks:
        # NCCL refuses two ranks on a GPU of one host. So ranks that share one say that they are on several hosts.
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()} {local_rank // count}"
        reason = f"runs on GPUs, which ranks share and so take turns: this host has {count} for {ranks} ranks"
    torch.get_device_module(kind).set_device(device)
    _say(reason)
    return Device(device, _BACKENDS[kind])


def _say(reason: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(reason, flush=True)
