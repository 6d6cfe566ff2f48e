"""Makes accelerate see one process and the mesh's device, whatever launcher set the environment."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

__all__ = ["single_process"]

# What accelerate reads: set by torchrun, by launchers of MPI, and by its own launcher.
_PREFIXES = ("ACCELERATE_", "FSDP_", "MV2_COMM_", "OMPI_COMM_", "PARALLELISM_CONFIG_", "PMI_")
_NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


@contextmanager
def single_process(args: TrainingArguments, device: torch.device) -> Iterator[TrainingArguments]:
    """Yield a copy of ``args`` whose world is this process on ``device``, for a Trainer that is made in the context.

    Replaces accelerate's state, as the constructor of each ``TrainingArguments`` does. What launchers set in the
    environment is hidden in the context.
    """
    args = copy.copy(args)
    names = [name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES)]
    hidden = {name: os.environ.pop(name) for name in names}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        state: Any = PartialState(cpu=device.type == "cpu")
        args.distributed_state = state
        args._n_gpu = int(device.type != "cpu")
        args.__dict__["_setup_devices"] = device  # a cached property, which would find its own device
        yield args
    finally:
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.update(hidden)
