"""What a job must come to: the unsplit model in one process, all microbatches one after the other.

Replicas are copies that keep their own buffers and random numbers, and have their gradients summed as one model would.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from differential.model import (
    Loss,
    build,
    make_optimizer,
    microbatches,
    next_random_numbers,
    seed_everything,
    values_of,
)
from differential.spec import Call, Job
from ldt.topology import Node

__all__ = ["CLIP_NORM", "Records", "UnsoundError", "outputs_of", "reference"]

CLIP_NORM = 0.05

Records = list[dict[str, Any]]  # for each call what is compared, by name


def reference(job: Job) -> dict[Node, Records]:
    """By node, for each call. Raises what the unsplit model raises."""
    with _one_thread():
        return _Unsplit(job).run()


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in the ranks: LayerNorm's backward sums in another order with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Replica:
    """What a node holds."""

    def __init__(self, job: Job, node: Node) -> None:
        self.job = job
        self.node = node
        seed_everything(job.seed_of(node))
        self.random = _random_states()
        self.renew(0)

    def renew(self, variation: int) -> None:
        """Other modules, of other weights."""
        rank = self.job.topology.ranks_of_stage(self.node.stage)[0]
        chunks = build(self.job, variation + self.job.variation_of(self.node.stage, rank))
        self.chunks = {index: chunks[index] for index in self.job.topology.chunks_of(self.node.stage)}
        self.modules: dict[str, Any] = {f"chunk {index}": chunk for index, chunk in self.chunks.items()}
        self.loss = Loss(self.job.reduction, self.job.loss == "Weighted") if self.node.stage == 0 else None
        if self.loss is not None:
            self.modules["loss"] = self.loss
        self.optimizer = make_optimizer(self.job, self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    def state(self) -> Any:
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return copy.deepcopy(([m.state_dict() for m in self.modules.values()], optimizer)), self.random

    def load(self, of_first: Any, own: Any) -> None:
        """The weights and buffers of the first replica, and the random numbers of this one."""
        modules, optimizer = copy.deepcopy(of_first[0])
        self.random = own[1]
        for module, values in zip(self.modules.values(), modules, strict=True):
            module.load_state_dict(values)
            module.zero_grad()
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Random numbers are this node's."""
        _set_random_states(self.random)
        yield
        self.random = _random_states()


class UnsoundError(Exception):
    """PyTorch itself is wrong: parameters whose gradients share memory get each other's sums."""


class _Unsplit:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.topology = job.topology
        self.nodes = {node: _Replica(job, node) for node in self.topology.nodes}
        self.edges = [node for node in self.topology.nodes if node.stage == 0]
        self.saved: dict[Node, Any] = {}
        # Those whose gradient had another's memory at some time since they were dropped.
        self.shared: set[torch.nn.Parameter] = set()

    def run(self) -> dict[Node, Records]:
        records: dict[Node, Records] = {node: [] for node in self.nodes}
        for index, call in enumerate(self.job.calls):
            found = getattr(self, f"_{call.kind}")(index, call)
            for node, held in self.nodes.items():
                records[node].append(found.get(node, {}) | values_of(held.modules, gradients=False))
        for node, held in self.nodes.items():
            with held.drawing():
                records[node].append({"the next random numbers": next_random_numbers()})
        return records

    # -- one method for each kind of call ------------------------------------------------------------------------

    def _step(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        changes = self.job.reduction == "token" or self.topology.dp > 1
        earlier = self._take_gradients() if changes else {}
        found = self._losses(index, call, training=True)
        if changes:
            self._sum_over_replicas(self._tokens(call) if self.job.reduction == "token" else 1)
            _add_back(earlier)
        norm = self._clip() if self.job.clips else None
        for node, held in self.nodes.items():
            found.setdefault(node, {}).update(values_of(held.modules, gradients=True))
            if norm is not None:
                found[node]["norm"] = norm
            if call.updates:
                self._update(held)
        return found

    def _eval(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        with torch.no_grad():
            return self._losses(index, call, training=False)

    def _save(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        self.saved = {node: held.state() for node, held in self.nodes.items()}
        return {}

    def _load(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        for node, held in self.nodes.items():
            held.load(self.saved[Node(node.stage, 0)], self.saved[node])
        return {}

    def _restart(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        for held in self.nodes.values():
            held.renew(1)
        return self._load(index, call)

    # -- parts of these ------------------------------------------------------------------------------------------

    def _losses(self, index: int, call: Call, training: bool) -> dict[Node, dict[str, Any]]:
        """Of each edge replica, after the backward of each microbatch if ``training``."""
        self._share_buffers()
        batches = {edge: microbatches(self.job, index, edge.replica) for edge in self.edges}
        whole = len(call.batches) * self.topology.edge_dp
        found: dict[Node, dict[str, Any]] = {}
        for edge, pairs in batches.items():
            losses, outputs = [], {}
            for number, (x, target) in enumerate(pairs):
                output = self._forward(edge.replica, number, x)
                outputs |= outputs_of(number, output)
                loss = _sum_of(self.nodes[edge].loss(output, target))
                if training and loss.requires_grad:
                    self._backward(edge, loss if self.job.reduction == "token" else loss / whole)
                losses.append(loss.detach())
            weights = [self._weight(target) for _, target in pairs]
            found[edge] = {
                "losses": torch.stack([loss / weight for loss, weight in zip(losses, weights, strict=True)]),
                "loss": torch.stack(losses).sum() / sum(weights),
            }
            if not training:
                found[edge] |= outputs
        return found

    def _share_buffers(self) -> None:
        """Replicas begin a call with those of the first, but for those that are no state."""
        for node, held in self.nodes.items():
            first = self.nodes[Node(node.stage, 0)]
            for index, chunk in held.chunks.items():
                state = first.chunks[index].state_dict()
                for name, buffer in chunk.named_buffers():
                    if name in state:
                        buffer.copy_(state[name])

    def _tokens(self, call: Call) -> int:
        return sum(call.batches) * self.topology.edge_dp

    def _weight(self, target: torch.Tensor) -> int:
        """Of a microbatch in the loss of the step."""
        return len(target) if self.job.reduction == "token" else 1

    def _backward(self, edge: Node, loss: torch.Tensor) -> None:
        if any(parameter.grad is not None for parameter in self.shared):
            raise UnsoundError("gradients of two parameters share memory, and PyTorch adds to both of them")
        with self.nodes[edge].drawing():
            torch.autograd.backward(loss)
        self.shared |= self._part_gradients()

    def _forward(self, replica: int, number: int, x: torch.Tensor) -> Any:
        cloud = replica + self.topology.edge_dp * (number % self.topology.served)
        output: Any = x
        for chunk in range(self.topology.num_chunks):
            held = self.nodes[self.topology.node_at(chunk, cloud)]
            with held.drawing():
                output = held.chunks[chunk](*(output if isinstance(output, tuple) else (output,)))
        return output

    def _part_gradients(self) -> set[torch.nn.Parameter]:
        """Give each its own memory. Those that shared theirs."""
        by_memory: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in dict.fromkeys(p for held in self.nodes.values() for p in held.parameters()):
            if parameter.grad is not None:
                by_memory.setdefault(parameter.grad.untyped_storage().data_ptr(), []).append(parameter)
        shared = {parameter for alike in by_memory.values() if len(alike) > 1 for parameter in alike}
        for parameter in shared:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        return shared

    def _take_gradients(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        earlier = {p: p.grad for held in self.nodes.values() for p in held.parameters()}
        for parameter in earlier:
            parameter.grad = None
        return earlier

    def _sum_over_replicas(self, divisor: int) -> None:
        """Each has gradients of its microbatches. Tokens divide them at the end: numbers of 16 bits see that."""
        for stage in range(self.topology.num_stages):
            held = [replica for node, replica in self.nodes.items() if node.stage == stage]
            for alike in zip(*(replica.parameters() for replica in held), strict=True):
                grads = [p.grad for p in alike if p.grad is not None]
                for parameter in alike if grads else ():
                    parameter.grad = torch.stack(grads).sum(0) / divisor

    def _clip(self) -> torch.Tensor:
        """Of one replica of each stage; the others are scaled alike."""
        whole = [p for node, held in self.nodes.items() if node.replica == 0 for p in held.parameters()]
        grads = [p.grad for p in whole if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        for held in self.nodes.values():
            torch.nn.utils.clip_grads_with_norm_(held.parameters(), CLIP_NORM, norm)
        return norm.double()

    def _update(self, held: _Replica) -> None:
        self.shared -= set(held.parameters())
        if held.optimizer is not None:
            held.optimizer.step()
            held.optimizer.zero_grad()


def outputs_of(number: int, output: Any) -> dict[str, Any]:
    """What the tail returned for a microbatch, by name."""
    tensors = output if isinstance(output, tuple) else (output,)
    return {
        f"output {place} of microbatch {number}": tensor.detach().clone()
        for place, tensor in enumerate(tensors)
    }


def _sum_of(loss: Any) -> torch.Tensor:
    """Without the number of tokens that it is the sum of."""
    total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
    return total


def _add_back(earlier: dict[torch.nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, grad in earlier.items():
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad


def _random_states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
