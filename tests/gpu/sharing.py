"""Lets more ranks than GPUs run: ranks share a GPU, and NCCL treats those that share one as ranks on several hosts.

NCCL refuses two ranks on one GPU of a host. It identifies hosts by NCCL_HOSTID: ranks 0 and 1 of two GPUs are on one
host, ranks 2 and 3 on another, and sockets connect the two, as with real hosts. Kernels of ranks that share a GPU take
turns, so this tests correctness, not speed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

__all__ = ["GPUS", "my_device"]

GPUS = torch.cuda.device_count()


def my_device() -> torch.device:
    """Make this rank's GPU the current one and return it. Call it before the process first uses NCCL."""
    host, index = divmod(dist.get_rank(), GPUS)
    if GPUS < 4:  # tests are for up to four ranks
        os.environ["NCCL_HOSTID"] = f"host {host}"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
