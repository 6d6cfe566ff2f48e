"""What must be set before CUDA starts in this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = [
    "MAX_QUEUES",
    "QUEUES_VARIABLE",
    "ask_for_queues",
    "load_kernels_at_once",
    "loads_lazily",
    "prepare",
    "queues",
]

_EAGER = 1  # CUmoduleLoadingMode of the driver's API
_NOT_INITIALIZED = 3  # CUresult

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MAX_QUEUES = 32
_DEFAULT_QUEUES = 8
_at_import = {"queues": MAX_QUEUES}
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver, on Linux and under WSL


def prepare() -> None:
    """Set what CUDA reads when it starts. Changes nothing on a machine without an NVIDIA GPU.

    Called when ldt is imported: when ``connect`` is called, CUDA has started.
    """
    if any(file.exists() for file in _DEVICE_FILES):
        load_kernels_at_once()
        ask_for_queues()


def load_kernels_at_once() -> None:
    """Unless the environment says otherwise, have CUDA load its kernels when it starts.

    By default, which is torch's as well, a kernel is loaded when it is first launched, and that waits for all that is
    queued on the GPU. If a receive of NCCL is, the rank waits for one that may wait for it in the same way: a first
    step did not end (2 x H200, torch 2.11, CUDA 13.0). Loading all at once costs a process some seconds and 1 GiB of
    its GPU; a process that does not use CUDA, nothing. Once CUDA has started it has no effect.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def ask_for_queues() -> None:
    """Unless the environment says otherwise, have CUDA make all hardware queues that it can when it starts.

    Streams share queues, 8 by default, in the order in which they were made, and one that waits holds up all that
    share its queue. If those are to compute what it waits for in the end, no rank goes on. Once CUDA has started it
    has no effect, and is not noted as if it had.
    """
    if not _has_started():
        os.environ.setdefault(QUEUES_VARIABLE, str(MAX_QUEUES))
    _at_import["queues"] = _asked_queues()


def queues() -> int:
    """The fewest hardware queues that CUDA can have made for this process, going by the environment.

    CUDA read it when it started, which may be before or after the variable was changed.
    """
    return min(_at_import["queues"], _asked_queues())


def _asked_queues() -> int:
    try:
        asked = int(os.environ.get(QUEUES_VARIABLE, _DEFAULT_QUEUES))
    except ValueError:
        asked = _DEFAULT_QUEUES
    return max(1, min(asked, MAX_QUEUES))


def _has_started() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int(0)))) != _NOT_INITIALIZED
    except (OSError, AttributeError):  # nobody has loaded the driver
        return False


def loads_lazily() -> bool:
    """Whether CUDA, which has started, loads a kernel when it is launched. Where it cannot tell: what it was told."""
    try:
        mode = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode(ctypes.byref(mode)) == 0:
            return mode.value != _EAGER
    except (OSError, AttributeError):  # no driver, or one from before there was a choice
        pass
    return os.environ.get("CUDA_MODULE_LOADING", "LAZY").upper() != "EAGER"
