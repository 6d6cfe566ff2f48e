"""Averages a chunk's gradients over its replicas: one all-reduce per dtype, started after its last backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.collectives import wait_or_fail
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import parts_of

__all__ = [
    "EarlierGradients",
    "GradReduction",
    "is_reduced_elsewhere",
    "refuse_sparse_gradient",
    "refuse_sparse_layers",
]


_SPARSE = "{} are sparse, which cannot be averaged over replicas: use layers with sparse=False"


class GradReduction:
    """Replaces each ``.grad`` by the mean over the replicas of the edge, where one without a gradient counts as zero.

    Of cloud replicas that one edge replica serves the sum is taken: each has gradients of a part of its microbatches,
    divided by the number of all of them.
    A parameter that has no gradient on any replica keeps none: a flag per parameter travels with its gradients, and
    is read, which waits for the device, only where a gradient is missing. ``what`` names it all in errors.

    Made when the gradients are complete; until ``finish``, which raises LdtError otherwise, the rank may do other work
    and must leave them alone.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: Mesh, what: str) -> None:
        self._mesh = mesh
        self._what = what
        buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad and not is_reduced_elsewhere(parameter, mesh):
                refuse_sparse_gradient(parameter, mesh, what)
                buckets.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        of_all = [parameter for bucket in buckets.values() for parameter in bucket]
        self._taken = [(p, p.grad, None if p.grad is None else p.grad._version) for p in of_all]
        self._started = [(bucket, *self._start(bucket)) for bucket in buckets.values()]

    @property
    def is_done(self) -> bool:
        """True once ``finish`` would not wait."""
        return all(work.is_completed() for _, _, work in self._started)

    def finish(self) -> None:
        """Wait, and write the means."""
        for _, flat, work in self._started:
            if flat.device.type == "cpu":
                wait_or_fail(work, self._mesh.detector, self._what)
            else:
                work.wait()
        self._check_untouched()
        for bucket, flat, _ in self._started:
            self._write(bucket, flat)
        self._started.clear()

    def _check_untouched(self) -> None:
        """Raise LdtError if a gradient is not what it was: what was done to it would be lost."""
        for parameter, grad, version in self._taken:
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                raise LdtError(
                    f"{self._what}: one of shape {list(parameter.shape)} was changed while it was averaged over the "
                    "replicas, and the change would be lost. Change gradients after step(), not in a hook"
                )
        self._taken.clear()

    def _start(self, bucket: list[torch.nn.Parameter]) -> tuple[torch.Tensor, dist.Work]:
        group = self._mesh.dp_group
        assert group is not None, f"{self._what}: there are no replicas"
        grads = [_shard(torch.zeros_like(p) if p.grad is None else p.grad) for p in bucket]
        flags = torch.tensor(
            [p.grad is not None for p in bucket], dtype=grads[0].dtype, device=grads[0].device
        )
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), flags])
        return flat, dist.all_reduce(flat, group=group, async_op=True)

    def _write(self, bucket: list[torch.nn.Parameter], flat: torch.Tensor) -> None:
        sizes = [_shard(p if p.grad is None else p.grad).numel() for p in bucket]
        *sums, flags = torch.split(flat, [*sizes, len(bucket)])
        missing = any(parameter.grad is None for parameter in bucket)
        anywhere = flags.tolist() if missing else [1.0] * len(bucket)
        for parameter, total, present in zip(bucket, sums, anywhere, strict=True):
            if present:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                shard = _shard(parameter.grad)
                shard.copy_(total.view_as(shard) / self._mesh.topology.edge_dp)


class EarlierGradients:
    """Those from before a step, set aside while it averages, scales or measures its own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._grads:
            parameter.grad = None

    def put_back(self) -> None:
        """In place of those of the step."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._grads.clear()

    def add_back(self) -> None:
        """Added to those of the step."""
        for parameter, grad in self._grads:
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._grads.clear()


def is_reduced_elsewhere(parameter: torch.Tensor, mesh: Mesh) -> bool:
    """True for one that is spread over the replicas (``fully_shard``): whoever did that reduces its gradient."""
    return isinstance(parameter, DTensor) and mesh.rank_info.spans_replicas(parameter.device_mesh)


def refuse_sparse_layers(modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Raise ValueError for a layer of ``modules``, by where they are, whose gradient could not be averaged."""
    if mesh.topology.replicas(mesh.stage) == 1:
        return
    for where, module in modules.items():
        for part in parts_of(module):
            if (
                isinstance(part, (nn.Embedding, nn.EmbeddingBag))
                and part.sparse
                and _is_averaged(part.weight, mesh)
            ):
                name = next(name for name, other in module.named_modules() if other is part)
                raise InputValueError(
                    _SPARSE.format(f"the gradients of {name or type(part).__name__} of {where}")
                )


def refuse_sparse_gradient(parameter: nn.Parameter, mesh: Mesh, what: str) -> None:
    """Raise LdtError if ``parameter`` has one that would have to be averaged: ``what`` names it."""
    grad = parameter.grad
    sparse = grad is not None and grad.layout is not torch.strided
    if sparse and mesh.topology.replicas(mesh.stage) > 1 and _is_averaged(parameter, mesh):
        raise LdtError(_SPARSE.format(what))


def _is_averaged(parameter: torch.Tensor, mesh: Mesh) -> bool:
    return parameter.requires_grad and not is_reduced_elsewhere(parameter, mesh)


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, to be changed in place: all replicas split it alike over the ranks of a node."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
