"""Holds the state of one node of the unsplit model: chunks, optimizer and random states."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from differential.model import Loss, build, make_optimizer, seed_everything
from differential.spec import Job
from ldt.topology import Node

__all__ = ["Replica"]


class Replica:
    """The state of one node."""

    def __init__(self, job: Job, node: Node) -> None:
        self.job = job
        self.node = node
        seed_everything(job.seed_of(node))
        self.random = random_states()
        self.renew(0)

    def renew(self, variation: int) -> None:
        """Replace the modules by new ones with other weights."""
        rank = self.job.topology.ranks_of_stage(self.node.stage)[0]
        chunks = build(self.job, variation + self.job.variation_of(self.node.stage, rank))
        self.chunks = {index: chunks[index] for index in self.job.topology.chunks_of(self.node.stage)}
        self.is_wrapped = {
            index: any(parameter.requires_grad for parameter in chunk.parameters())
            for index, chunk in self.chunks.items()
        }
        self.modules: dict[str, Any] = {f"chunk {index}": chunk for index, chunk in self.chunks.items()}
        self.loss = Loss(self.job) if self.node.stage == 0 else None
        if self.loss is not None:
            self.modules["loss"] = self.loss
        self.optimizer = make_optimizer(self.job, self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    def state(self) -> Any:
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return copy.deepcopy(([m.state_dict() for m in self.modules.values()], optimizer)), self.random

    def load(self, of_first: Any, own: Any) -> None:
        """Load the weights and buffers of the first replica, and this replica's random states."""
        modules, optimizer = copy.deepcopy(of_first[0])
        self.random = own[1]
        for module, values in zip(self.modules.values(), modules, strict=True):
            module.load_state_dict(values)
            module.zero_grad()
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Use this node's random states."""
        set_random_states(self.random)
        yield
        self.random = random_states()


def random_states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
