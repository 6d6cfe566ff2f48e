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
from ldt.runtime.model.module_state import all_submodules

__all__ = [
    "EarlierGradients",
    "GradReduction",
    "check_sparse_gradient",
    "check_sparse_layers",
    "is_reduced_elsewhere",
]


_SPARSE = "{} are sparse, which cannot be averaged over replicas: use layers with sparse=False"


class GradReduction:
    """Replaces each ``.grad`` by the mean over the edge's replicas. A missing gradient counts as zero.

    Gradients of the cloud replicas that one edge replica serves are summed: each has those of a share of the
    microbatches, divided by the number of all of them.
    A parameter without a gradient on every replica keeps none. A flag per parameter travels with the gradients; it is
    read, which waits for the device, only where a gradient is missing. ``what`` names the gradients in errors.

    Create one when the gradients are complete. Until ``finish`` the rank may do other work but must not change them;
    ``finish`` raises LdtError if they were changed.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: Mesh, what: str) -> None:
        self._mesh = mesh
        self._what = what
        buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad and not is_reduced_elsewhere(parameter, mesh):
                check_sparse_gradient(parameter, mesh, what)
                buckets.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        reduced = [parameter for bucket in buckets.values() for parameter in bucket]
        self._versions = [(p, p.grad, None if p.grad is None else p.grad._version) for p in reduced]
        self._started = [(bucket, *self._start(bucket)) for bucket in buckets.values()]

    @property
    def is_done(self) -> bool:
        """True once ``finish`` would not wait."""
        return all(work.is_completed() for _, _, work in self._started)

    def finish(self) -> None:
        """Wait for the all-reduce and write the means."""
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
        """Raise LdtError if a gradient was changed meanwhile: the change would be lost."""
        for parameter, grad, version in self._versions:
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                raise LdtError(
                    f"{self._what}: one of shape {list(parameter.shape)} was changed while it was averaged over the "
                    "replicas, and the change would be lost. Change gradients after step(), not in a hook"
                )
        self._versions.clear()

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
    """Gradients from before a step, set aside while the step averages, scales or measures its own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._grads:
            parameter.grad = None

    def restore(self) -> None:
        """Replace the gradients of the step by the earlier ones."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._grads.clear()

    def add_back(self) -> None:
        """Add the earlier gradients to those of the step."""
        for parameter, grad in self._grads:
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._grads.clear()


def is_reduced_elsewhere(parameter: torch.Tensor, mesh: Mesh) -> bool:
    """True if it is sharded over the replicas (``fully_shard``): the wrapper then reduces its gradient."""
    return isinstance(parameter, DTensor) and mesh.rank_info.spans_replicas(parameter.device_mesh)


def check_sparse_layers(modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Raise ValueError for a layer whose sparse gradient would have to be averaged. Keys name the ``modules``."""
    if mesh.topology.replicas(mesh.stage) == 1:
        return
    for owner, module in modules.items():
        for part in all_submodules(module):
            if (
                isinstance(part, (nn.Embedding, nn.EmbeddingBag))
                and part.sparse
                and _is_averaged(part.weight, mesh)
            ):
                name = next(name for name, other in module.named_modules() if other is part)
                raise InputValueError(
                    _SPARSE.format(f"the gradients of {name or type(part).__name__} of {owner}")
                )


def check_sparse_gradient(parameter: nn.Parameter, mesh: Mesh, what: str) -> None:
    """Raise LdtError if the gradient of ``parameter`` is sparse and would have to be averaged."""
    grad = parameter.grad
    sparse = grad is not None and grad.layout is not torch.strided
    if sparse and mesh.topology.replicas(mesh.stage) > 1 and _is_averaged(parameter, mesh):
        raise LdtError(_SPARSE.format(what))


def _is_averaged(parameter: torch.Tensor, mesh: Mesh) -> bool:
    return parameter.requires_grad and not is_reduced_elsewhere(parameter, mesh)


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, to be changed in place. All replicas shard a tensor alike over the ranks of a node."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
