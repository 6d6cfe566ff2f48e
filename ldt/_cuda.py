"""Sets the environment variables that CUDA, and PyTorch's NCCL groups, read when they start in this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = [
    "DEFAULTS",
    "MAX_QUEUES",
    "QUEUES_VARIABLE",
    "load_kernels_at_once",
    "loads_lazily",
    "prepare",
    "queues",
    "raise_errors",
    "request_queues",
]

_EAGER = 1  # CUmoduleLoadingMode of the driver's API
_NOT_INITIALIZED = 3  # CUresult

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MAX_QUEUES = 32
DEFAULTS = {  # what is set unless the environment says otherwise
    "CUDA_MODULE_LOADING": "EAGER",
    QUEUES_VARIABLE: str(MAX_QUEUES),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_DEFAULT_QUEUES = 8
_at_import = {"queues": MAX_QUEUES}
_DEVICE_FILES = (
    tuple(  # of the driver: on Linux (the first may be created only when CUDA starts), Tegra and WSL
        map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/nvmap", "/dev/dxg"))
    )
)


def prepare() -> None:
    """Set the variables that CUDA and NCCL groups read at their start. Does nothing without an NVIDIA GPU.

    Called by ``import ldt``: by the time of ``connect``, CUDA has started.
    """
    if any(file.exists() for file in _DEVICE_FILES):
        load_kernels_at_once()
        request_queues()
        raise_errors()
    _at_import["queues"] = _requested_queues()


def load_kernels_at_once() -> None:
    """Make CUDA load its kernels when it starts, unless the environment says otherwise.

    By default, also in torch, a kernel is loaded at its first launch, which waits for everything queued on the GPU. If
    a receive of NCCL is queued, that waits for a peer which may itself be loading a kernel: a first step deadlocked
    (2 x H200, torch 2.11, CUDA 13.0). Eager loading costs a process some seconds and 1 GiB of GPU memory, and nothing
    if it does not use CUDA. Has no effect once CUDA has started.
    """
    _set_default("CUDA_MODULE_LOADING")


def request_queues() -> None:
    """Make CUDA create as many hardware queues as it can when it starts, unless the environment says otherwise.

    CUDA assigns streams to its queues, 8 by default, in order of creation. A stream that waits blocks all streams of
    its queue; if one of these is to compute what it waits for, the ranks deadlock. Has no effect once CUDA has
    started, and ``queues`` then does not count on it.
    """
    if not _has_started():
        _set_default(QUEUES_VARIABLE)


def raise_errors() -> None:
    """Have an error of CUDA raised in the step that caused it, unless the environment says otherwise.

    By default the watchdog of an NCCL group ends the process, so its error never reaches the other ranks.
    """
    _set_default("TORCH_NCCL_RETHROW_CUDA_ERRORS")


def _set_default(name: str) -> None:
    os.environ.setdefault(name, DEFAULTS[name])


def queues() -> int:
    """Return the least number of hardware queues that CUDA can have in this process, judging by the environment.

    CUDA read the variable when it started, which may have been before or after it was changed.
    """
    return min(_at_import["queues"], _requested_queues())


def _requested_queues() -> int:
    try:
        requested = int(os.environ.get(QUEUES_VARIABLE, _DEFAULT_QUEUES))
    except ValueError:
        requested = _DEFAULT_QUEUES
    return max(1, min(requested, MAX_QUEUES))


def _has_started() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int(0)))) != _NOT_INITIALIZED
    except (OSError, AttributeError):  # the driver is not loaded
        return False


def loads_lazily() -> bool:
    """Whether CUDA, once started, loads kernels at launch. If the driver cannot tell, the environment decides."""
    try:
        mode = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode(ctypes.byref(mode)) == 0:
            return mode.value != _EAGER
    except (OSError, AttributeError):  # no driver, or one without lazy loading
        pass
    return os.environ.get("CUDA_MODULE_LOADING", "LAZY").upper() != "EAGER"
