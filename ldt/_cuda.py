"""What must be set before CUDA starts in this process."""

from __future__ import annotations

import ctypes
import os

__all__ = ["load_kernels_at_once", "loads_lazily"]

_EAGER = 1  # CUmoduleLoadingMode of the driver's API


def load_kernels_at_once() -> None:
    """Unless the environment says otherwise, have CUDA load its kernels when it starts.

    By default, which is torch's as well, a kernel is loaded when it is first launched, and that waits for all that is
    queued on the GPU. If a receive of NCCL is, the rank waits for one that may wait for it in the same way: a first
    step did not end (2 x H200, torch 2.11, CUDA 13.0). Loading all at once costs a process some seconds and 1 GiB of
    its GPU; a process that does not use CUDA, nothing. Once CUDA has started it has no effect.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def loads_lazily() -> bool:
    """Whether CUDA, which has started, loads a kernel when it is launched. Where it cannot tell: what it was told."""
    try:
        mode = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode(ctypes.byref(mode)) == 0:
            return mode.value != _EAGER
    except (OSError, AttributeError):  # no driver, or one from before there was a choice
        pass
    return os.environ.get("CUDA_MODULE_LOADING", "LAZY").upper() != "EAGER"
