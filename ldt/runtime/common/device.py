"""Which device and which backend a mesh uses when the caller does not say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = [
    "choose_backend",
    "choose_device",
    "current_stream",
    "synchronize_current_stream",
    "warm_up_libraries",
]

_POLL_SECONDS = 0.001
_opened = threading.local()
_DEVICE_OF_BACKEND = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu", "gloo": "cpu"}


def choose_device(device: torch.device | str | None, backend: str | None) -> torch.device:
    """``device``, else the current device of the kind that ``backend``, else the default group, is for.

    Always with an index, but for the CPU, which has none. Raises ValueError for one that this process does not have, or
    that the backend is not for.
    """
    if device is not None:
        chosen = _indexed(torch.device(device))
        _check_backend(chosen, backend)
        return chosen
    kinds = [
        _DEVICE_OF_BACKEND.get(name) for name in ([backend] if backend else _default_backends().values())
    ]
    accelerators = [kind for kind in kinds if kind is not None and kind != "cpu"]
    if "cpu" in kinds:  # a default group for both: for whichever there is
        accelerators = [kind for kind in accelerators if _is_available(kind)]
    if not accelerators:
        return torch.device("cpu")
    if not _is_available(accelerators[0]):
        raise ValueError(
            f"backend {backend or accelerators[0]!r} is for {accelerators[0]} devices, of which this process has "
            "none: install PyTorch for them and check that the driver sees one, or use backend='gloo' on the CPU"
        )
    return _indexed(torch.device(accelerators[0]))


def _check_backend(device: torch.device, backend: str | None) -> None:
    name = backend or _default_backends().get(device.type)
    kind = _DEVICE_OF_BACKEND.get(name or "", device.type)
    if kind != device.type:
        given = "of connect" if backend else "of the default process group for it"
        raise ValueError(
            f"backend {name!r}, {given}, moves tensors of {kind} devices, and device is {device}: give both for one "
            "kind, such as init_process_group('cpu:gloo,cuda:nccl') and device='cuda', or leave out device"
        )


def choose_backend(device: torch.device, backend: str | None) -> str:
    """``backend``, else what the default group uses for ``device``. Raises ValueError if it has none."""
    name = backend or _default_backends().get(device.type)
    if name is None:
        raise ValueError(
            f"the default process group has no backend for {device}: it has {_default_backends()}; write "
            f"init_process_group('cpu:gloo,{device.type}:...') with its backend, such as cuda:nccl, or give connect "
            "backend="
        )
    return name


def warm_up_libraries(device: torch.device, check: Callable[[], None]) -> None:
    """Multiply matrices, forward and backward, before anything is under way on ``device``: once in each thread.

    The first product of a thread, and autograd has threads of its own, makes the thread's handle of cuBLAS, which waits
    for all that is queued on the device: also for a receive that waits for this rank. ``check`` is called while the
    product is under way, and may raise.
    """
    opened: set[torch.device] = _opened.__dict__.setdefault("devices", set())
    if device.type == "cpu" or device in opened:
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        ones = torch.ones(16, 16, dtype=torch.float32, device=device, requires_grad=True)
        torch.autograd.backward(torch.nn.functional.linear(ones, ones, ones[0]).sum())
    end = torch.Event(device)
    end.record(current_stream(device))
    while not end.query():
        check()
        time.sleep(_POLL_SECONDS)
    opened.add(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Of ``device``, which need not be the current one: an event records a stream of that one unless told otherwise."""
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def synchronize_current_stream(device: torch.device) -> None:
    """Wait on the host for what was launched on the current stream of ``device``.

    Not for the whole device: a lane's stream may hold a receive that only ends when this rank goes on.
    """
    if device.type != "cpu":
        current_stream(device).synchronize()


def _default_backends() -> dict[str, str]:
    """Device kind to backend, of the default group."""
    if not dist.is_initialized():
        return {"cpu": "gloo"}
    config = dist.get_backend_config()
    return dict(pair.split(":", 1) for pair in config.split(","))


def _is_available(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # a kind that this build does not know
        return False


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if not _is_available(device.type):
        raise ValueError(
            f"device {device.type!r} was asked for, but this process has none: install a PyTorch build for it and "
            "check that the driver sees one, or use device='cpu'"
        )
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)
