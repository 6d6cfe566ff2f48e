"""The norm of all gradients of a model whose parameters are spread over stages, ranks and replicas."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ldt.runtime.mesh import Mesh

__all__ = ["clip_grad_norm_"]

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, mesh: Mesh
) -> torch.Tensor:
    """Scale the gradients of the whole model so that their 2-norm is at most ``max_norm``.

    ``parameters`` are this rank's. A collective call of all ranks, to be made after ``Pipeline.step``, when replicas
    have equal gradients; one small message over the control plane, and one wait for the device.
    Every element counts once: plain tensors, which all ranks of a stage and all replicas hold alike, on one rank;
    shards (DTensor, as ``parallelize_module`` and ``fully_shard`` make them over ``mesh.tp_mesh`` and
    ``mesh.dp_mesh``) on the ranks that hold them.
    Returns the norm before clipping, the same on every rank: that of ``torch.nn.utils.clip_grad_norm_``
    on the unsplit model but for the order of the sum, which is made in double precision. Its dtype is float32, or
    float64 where a gradient here has that.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    with mesh.collective("clip_grad_norm_()"):
        whole = [
            _without_partial(grad) for grad in grads
        ]  # a collective of the ranks of each: on all of them
        squares = _sum_of_squares([_local(grad) for grad in whole if _counts_here(grad, mesh)])
        (total,) = mesh.control.sum([squares])
    norm = total**0.5
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # also when the norm is not finite, as in torch
        for grad in grads:
            grad.mul_(scale)
    dtypes = (grad.dtype for grad in grads if grad.is_floating_point())
    return torch.tensor(
        norm, dtype=functools.reduce(torch.promote_types, dtypes, torch.float32), device=mesh.device
    )


def _counts_here(grad: torch.Tensor, mesh: Mesh) -> bool:
    """True on the one rank, or one for each shard, whose elements of ``grad`` are counted."""
    first_in_node, first_replica = mesh.tp_rank == 0, mesh.replica == 0
    if not isinstance(grad, DTensor):
        return first_in_node and first_replica
    place = zip(grad.device_mesh.get_coordinate() or (), grad.placements, strict=True)
    first = all(coordinate == 0 for coordinate, placement in place if isinstance(placement, Replicate))
    # Where its device mesh does not go, over the node or over replicas, it is the same everywhere.
    in_node = first_in_node or mesh.spans_node(grad.device_mesh)
    return first and in_node and (first_replica or mesh.spans_replicas(grad.device_mesh))


def _without_partial(grad: torch.Tensor) -> torch.Tensor:
    """With the sums made that are still to be made over its device mesh."""
    if not isinstance(grad, DTensor) or not any(isinstance(p, Partial) for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    )


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sum_of_squares(grads: list[torch.Tensor]) -> float:
    """Reads one number from each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    total = 0.0
    for device, some in by_device.items():
        norms = torch._foreach_norm(some, 2, dtype=_wide(device))
        total += float(torch.stack(list(norms)).square().sum())
    return total


def _wide(device: torch.device) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
