"""Chooses the device and backend of a mesh, and warms up the device's libraries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = [
    "autocast_dtype",
    "choose_backend",
    "choose_device",
    "current_stream",
    "synchronize_current_stream",
    "warm_up_libraries",
]

_POLL_SECONDS = 0.001
_warm = threading.local()
_DEVICE_OF_BACKEND = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu", "gloo": "cpu"}


def choose_device(device: torch.device | str | None, backend: str | None) -> torch.device:
    """``device``, or the current device of the type that ``backend`` or the default group serves.

    The result has an index, except for the CPU. Raises ValueError if this process has no such device, or if the backend
    does not serve it.
    """
    if device is not None:
        chosen = _indexed(torch.device(device))
        _check_backend(chosen, backend)
        return chosen
    kinds = [
        _DEVICE_OF_BACKEND.get(name) for name in ([backend] if backend else _default_backends().values())
    ]
    accelerators = [kind for kind in kinds if kind is not None and kind != "cpu"]
    if "cpu" in kinds:  # the default group serves both: use an accelerator if there is one
        accelerators = [kind for kind in accelerators if _is_available(kind)]
    if not accelerators:
        return torch.device("cpu")
    if not _is_available(accelerators[0]):
        raise ValueError(
            f"backend {backend or accelerators[0]!r} needs a {accelerators[0]} device, but this process has none: "
            "install a PyTorch build for it and check that the driver sees one, or use backend='gloo' on the CPU"
        )
    return _indexed(torch.device(accelerators[0]))


def _check_backend(device: torch.device, backend: str | None) -> None:
    name = backend or _default_backends().get(device.type)
    kind = _DEVICE_OF_BACKEND.get(name or "", device.type)
    if kind != device.type:
        source = "given to connect" if backend else "of the default process group"
        raise ValueError(
            f"backend {name!r} ({source}) moves tensors of {kind} devices, but device is {device}: give a "
            "backend and a device that match, such as init_process_group('cpu:gloo,cuda:nccl') and device='cuda', or "
            "omit device"
        )


def choose_backend(device: torch.device, backend: str | None) -> str:
    """``backend``, or the default group's backend for ``device``. Raises ValueError if there is none."""
    name = backend or _default_backends().get(device.type)
    if name is None:
        raise ValueError(
            f"the default process group has no backend for {device}, only {_default_backends()}: call "
            f"init_process_group('cpu:gloo,{device.type}:...') with a backend for it, such as cuda:nccl, or pass "
            "backend= to connect"
        )
    return name


def warm_up_libraries(device: torch.device, check: Callable[[], None]) -> None:
    """Run a matmul forward and backward on ``device`` before anything is queued there, once per thread.

    The first matmul of a thread, autograd's own threads included, creates the thread's cuBLAS handle. That waits for
    everything queued on the device, and so would deadlock behind a receive that waits for this rank. ``check`` is
    polled while the matmul runs, and may raise.
    """
    warm: set[torch.device] = _warm.__dict__.setdefault("devices", set())
    if device.type == "cpu" or device in warm:
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        ones = torch.ones(16, 16, dtype=torch.float32, device=device, requires_grad=True)
        torch.autograd.backward(torch.nn.functional.linear(ones, ones, ones[0]).sum())
    end = torch.Event(device)
    end.record(current_stream(device))
    while not end.query():
        check()
        time.sleep(_POLL_SECONDS)
    warm.add(device)


def autocast_dtype(device: torch.device) -> str | None:
    """The dtype that autocast computes in on ``device``, as "bfloat16"; None if it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def current_stream(device: torch.device) -> torch.Stream:
    """The current stream of ``device``, which need not be the current device.

    ``Event.record()`` without a stream would record one of the current device.
    """
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def synchronize_current_stream(device: torch.device) -> None:
    """Block the host until the current stream of ``device`` is idle.

    Synchronizing the whole device could deadlock: a lane's stream may hold a receive that needs this rank to go on.
    """
    if device.type != "cpu":
        current_stream(device).synchronize()


def _default_backends() -> dict[str, str]:
    """The default group's backends by device type."""
    if not dist.is_initialized():
        return {"cpu": "gloo"}
    config = dist.get_backend_config()
    return dict(pair.split(":", 1) for pair in config.split(","))


def _is_available(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # this build does not know the device type
        return False


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if not _is_available(device.type):
        raise ValueError(
            f"device {device.type!r} was requested, but this process has none: install a PyTorch build for it and "
            "check that the driver sees one, or use device='cpu'"
        )
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)
