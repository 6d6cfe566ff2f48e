"""What must be set before CUDA starts in this process."""

from __future__ import annotations

import os

__all__ = ["load_kernels_at_once"]


def load_kernels_at_once() -> None:
    """Unless the environment says otherwise, have CUDA load its kernels when it starts.

    By default, which is torch's as well, a kernel is loaded when it is first launched, and that waits for all that is
    queued on the GPU. If a receive of NCCL is, the rank waits for one that may wait for it in the same way: a first
    step did not end (2 x H200, torch 2.11, CUDA 13.0). Loading all at once costs a process some seconds and 1 GiB of
    its GPU; a process that does not use CUDA, nothing. Once CUDA has started this does nothing, as torch has set it.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
