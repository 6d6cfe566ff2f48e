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


def single_process(args: TrainingArguments, device: torch.device) -> TrainingArguments:
    """Return a copy of ``args`` whose world is this process on ``device``.

    Replaces accelerate's state, as the constructor of each ``TrainingArguments`` does. The environment stays as it is.
    """
    args = copy.copy(args)
    with _hidden_ranks(device):
        AcceleratorState._reset_state(reset_partial_state=True)
        state: Any = PartialState(cpu=device.type == "cpu")
    args.distributed_state = state
    args._n_gpu = int(device.type != "cpu")
    args.__dict__["_setup_devices"] = device  # a cached property, which would find its own device
    return args


@contextmanager
def _hidden_ranks(device: torch.device) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name in _NAMES or name.startswith(_PREFIXES):
            del os.environ[name]
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
