"""Computes the expected result of a job: the unsplit model in one process, microbatch by microbatch.

Replicas are copies with their own buffers and random states. Their gradients are summed as in one model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from differential.model import ON_EVERY_STAGE, microbatches, next_random_numbers, values_of
from differential.replica import Replica
from differential.spec import Call, Job
from ldt.topology import Node

__all__ = ["CLIP_NORM", "SCALER", "Records", "autocast_of", "outputs_of", "reference"]

CLIP_NORM = 0.05
SCALER: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}

Records = list[dict[str, Any]]  # the compared values of each call, by name


def reference(job: Job) -> dict[Node, Records]:
    """Return the records by node, for each call. Raises what the unsplit model raises."""
    with _one_thread():
        return _Unsplit(job).run()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as the ranks do: LayerNorm's backward sums in another order with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Unsplit:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.topology = job.topology
        self.nodes = {node: Replica(job, node) for node in self.topology.nodes}
        self.edges = [node for node in self.topology.nodes if node.stage == 0]
        self.saved: dict[Node, Any] = {}
        self.scaler = torch.amp.GradScaler("cpu", enabled=job.scales, **SCALER)
        self.scaler.scale(torch.zeros(()))  # initializes the scale, even if no loss is scaled

    def run(self) -> dict[Node, Records]:
        records: dict[Node, Records] = {node: [] for node in self.nodes}
        for index, call in enumerate(self.job.calls):
            self._set_modes(training=not call.quiet)
            found = getattr(self, f"_{call.kind}")(index, call)
            self._set_modes(training=True)
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
            self._sum_over_replicas(
                self._tokens(call) if self.job.reduction == "token" else self.topology.edge_dp
            )
            _add_back(earlier)
        whole = self._unscale() if self.job.scales and call.updates else None
        norm = self._clip() if self.job.clips and (call.updates or not self.job.scales) else None
        for node, held in self.nodes.items():
            found.setdefault(node, {}).update(values_of(held.modules, gradients=True))
            if norm is not None:
                found[node]["norm"] = norm
            if call.updates:
                self._update(held, whole)
        if whole is not None:
            self.scaler.update()
        for record in found.values():
            record["scale"] = torch.tensor(self.scaler.get_scale())
        return found

    def _eval(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        with torch.no_grad():
            return self._losses(index, call, training=False)

    def _validate(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        return {}

    def _thaw(self, index: int, call: Call) -> dict[Node, dict[str, Any]]:
        for module in self._modules():
            module.requires_grad_(True)
        return {}

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

    def _modules(self) -> Iterator[torch.nn.Module]:
        return (module for held in self.nodes.values() for module in held.modules.values())

    def _set_modes(self, training: bool) -> None:
        for module in self._modules():
            module.train(training)

    # -- parts of these ------------------------------------------------------------------------------------------

    def _losses(self, index: int, call: Call, training: bool) -> dict[Node, dict[str, Any]]:
        """Return the losses of each edge replica; runs each backward if ``training``."""
        self._share_buffers()
        batches = {edge: microbatches(self.job, index, edge.replica) for edge in self.edges}
        found: dict[Node, dict[str, Any]] = {}
        for edge, pairs in batches.items():
            losses, outputs = [], {}
            for number, (inputs, target) in enumerate(pairs):
                with autocast_of(self.job):
                    output = self._forward(edge.replica, number, inputs)
                    outputs |= outputs_of(number, output)
                    loss = _sum_of(self.nodes[edge].loss(output, target))
                if training and loss.requires_grad:
                    root = loss if self.job.reduction == "token" else loss / len(pairs)
                    self._backward(edge, self.scaler.scale(root))
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
        """Copy the first replica's buffers to the others: all of wrapped chunks, otherwise those in state_dict."""
        for node, held in self.nodes.items():
            first = self.nodes[Node(node.stage, 0)]
            for index, chunk in held.chunks.items():
                wrapped = self.job.wraps and held.is_wrapped[index]
                state = chunk.state_dict() if self.job.shares_buffers else ()
                first_buffers = dict(first.chunks[index].named_buffers())
                for name, buffer in chunk.named_buffers():
                    if wrapped or name in state:
                        buffer.copy_(first_buffers[name])

    def _tokens(self, call: Call) -> int:
        return sum(call.batches) * self.topology.edge_dp

    def _weight(self, target: torch.Tensor) -> int:
        """Return the weight of a microbatch in the loss of the step."""
        return len(target) if self.job.reduction == "token" else 1

    def _backward(self, edge: Node, loss: torch.Tensor) -> None:
        with self.nodes[edge].drawing():
            torch.autograd.backward(loss)
        self._part_gradients()

    def _forward(self, replica: int, number: int, inputs: Any) -> Any:
        cloud = replica + self.topology.edge_dp * (number % self.topology.served)
        named = dict(inputs) if isinstance(inputs, dict) else {"x": inputs}
        output: Any = named.pop("x")
        for chunk in range(self.topology.num_chunks):
            node = self.topology.node_at(chunk, cloud)
            given = {name: named[name] for name in named if node.stage == 0 or name in ON_EVERY_STAGE}
            with self.nodes[node].drawing():
                tensors = output if isinstance(output, tuple) else (output,)
                output = self.nodes[node].chunks[chunk](*tensors, **given)
        return output

    def _part_gradients(self) -> None:
        """Give each gradient its own memory: if two share memory, PyTorch would add to both."""
        by_memory: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in dict.fromkeys(p for held in self.nodes.values() for p in held.parameters()):
            if parameter.grad is not None:
                by_memory.setdefault(parameter.grad.untyped_storage().data_ptr(), []).append(parameter)
        shared = {parameter for alike in by_memory.values() if len(alike) > 1 for parameter in alike}
        for parameter in shared:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()

    def _take_gradients(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        earlier = {p: p.grad for held in self.nodes.values() for p in held.parameters()}
        for parameter in earlier:
            parameter.grad = None
        return earlier

    def _sum_over_replicas(self, divisor: int) -> None:
        """Sum the gradients of the replicas. Dividing by tokens comes last, which matters in 16-bit precision."""
        for stage in range(self.topology.num_stages):
            held = [replica for node, replica in self.nodes.items() if node.stage == stage]
            for alike in zip(*(replica.parameters() for replica in held), strict=True):
                grads = [p.grad for p in alike if p.grad is not None]
                for parameter in alike if grads else ():
                    parameter.grad = torch.stack(grads).sum(0) / divisor

    def _clip(self) -> torch.Tensor:
        """Clip one replica of each stage; the others are scaled equally."""
        whole = [p for node, held in self.nodes.items() if node.replica == 0 for p in held.parameters()]
        grads = [p.grad for p in whole if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        for held in self.nodes.values():
            torch.nn.utils.clip_grads_with_norm_(held.parameters(), CLIP_NORM, norm)
        return norm.double()

    def _unscale(self) -> torch.optim.Optimizer:
        """Unscale with one dummy optimizer that represents all of them."""
        every = [parameter for held in self.nodes.values() for parameter in held.parameters()]
        grads = [parameter.grad for parameter in every if parameter.grad is not None]
        holders = [torch.nn.Parameter(torch.zeros(())), *map(_holder_of, grads)]
        holders[0].grad = torch.zeros(())  # at least one gradient
        whole = torch.optim.SGD(holders, lr=0.0)
        self.scaler.unscale_(whole)
        return whole

    def _update(self, held: Replica, whole: torch.optim.Optimizer | None) -> None:
        overflown = whole is not None and any(self.scaler._found_inf_per_device(whole).values())
        if held.optimizer is not None:
            if not overflown:
                held.optimizer.step()
            held.optimizer.zero_grad()


def autocast_of(job: Job) -> AbstractContextManager[object]:
    """Return the autocast context of forwards."""
    return torch.autocast("cpu", torch.bfloat16, enabled=job.autocasts)


def outputs_of(number: int, output: Any) -> dict[str, Any]:
    """Return the tail's outputs for a microbatch, by name."""
    tensors = output if isinstance(output, tuple) else (output,)
    return {
        f"output {index} of microbatch {number}": tensor.detach().clone()
        for index, tensor in enumerate(tensors)
    }


def _sum_of(loss: Any) -> torch.Tensor:
    """Return the sum of losses without the number of tokens."""
    total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
    return total


def _holder_of(grad: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter with this gradient as real numbers: GradScaler unscales no complex ones on a CPU."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    holder = torch.nn.Parameter(torch.zeros_like(real))
    holder.grad = real
    return holder


def _add_back(earlier: dict[torch.nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, grad in earlier.items():
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad
