"""Clips the gradient norm of a model that is split over stages, ranks and replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ldt._torch_private import foreach_norm
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.module_state import is_tensor_parallel

__all__ = ["clip_grad_norm_"]

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, mesh: Mesh, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of the whole model so that their norm is at most ``max_norm``.

    ``parameters`` are this rank's. A collective call of all ranks: call it after ``Pipeline.step``, when replicas have
    equal gradients. It sends one small message over the control plane and waits for the device once.

    Every element counts once. Plain tensors, which all ranks of a stage and all replicas hold alike, count on one rank.
    Shards count on the ranks that hold them: DTensors over ``mesh.tp_mesh`` and ``mesh.dp_mesh``, as
    ``parallelize_module`` and ``fully_shard`` create them, and parameters marked ``tensor_model_parallel=True``, as in
    Megatron's layers.

    Returns the norm before clipping, the same on every rank. It equals that of ``torch.nn.utils.clip_grad_norm_`` on
    the unsplit model except for the order of the sum, which is computed in double precision. Its dtype is float32, or
    float64 if a gradient on this rank has that dtype. Raises ValueError if ``norm_type`` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise InputValueError(f"norm_type must be a positive number or infinity, got {norm_type}")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    pairs = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
    with mesh.collective("clip_grad_norm_()"):
        # May be a collective of a gradient's device mesh, so all ranks do it.
        whole = [(tensor, _without_partial(grad)) for tensor, grad in pairs]
        norms = _norms(
            [_local(grad) for tensor, grad in whole if _counts_here(tensor, grad, mesh)], norm_type
        )
        norm = _norm_over_ranks(norms, norm_type, mesh)
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # true for a non-finite norm as well, as in torch
        for _, grad in pairs:
            _multiply(grad, scale)
    dtypes = (grad.dtype.to_real() for _, grad in pairs if grad.element_size() > 1)
    return torch.tensor(
        norm, dtype=functools.reduce(torch.promote_types, dtypes, torch.float32), device=mesh.device
    )


def _norm_over_ranks(norms: list[float], norm_type: float, mesh: Mesh) -> float:
    """The norm of the ``norms`` of all ranks' tensors."""
    if math.isinf(norm_type):
        largest = mesh.control.all_gather(_largest(norms), float)
        return _largest(largest)
    (total,) = mesh.control.sum([sum(norm**norm_type for norm in norms)])
    return float(total ** (1.0 / norm_type))


def _largest(norms: list[float]) -> float:
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def _counts_here(tensor: torch.Tensor, grad: torch.Tensor, mesh: Mesh) -> bool:
    """True on the rank (for shards: one rank per shard) that counts the elements of ``grad``."""
    first_in_node, first_replica = mesh.tp_rank == 0, mesh.replica == 0
    if not isinstance(grad, DTensor):
        return (first_in_node or is_tensor_parallel(tensor)) and first_replica
    axes = zip(grad.device_mesh.get_coordinate() or (), grad.placements, strict=True)
    first = all(coordinate == 0 for coordinate, placement in axes if isinstance(placement, Replicate))
    # If its device mesh does not span the node, or the replicas, it is the same on all of them.
    in_node = first_in_node or mesh.rank_info.spans_node(grad.device_mesh)
    return first and in_node and (first_replica or mesh.rank_info.spans_replicas(grad.device_mesh))


def _without_partial(grad: torch.Tensor) -> torch.Tensor:
    """Reduce pending partial sums over its device mesh."""
    if not isinstance(grad, DTensor) or not any(isinstance(p, Partial) for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    )


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norms(grads: list[torch.Tensor], norm_type: float) -> list[float]:
    """The norms as numbers, with one read per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).extend(_magnitudes(grad))
    found: list[float] = []
    for device, some in by_device.items():
        if some:
            found += torch.stack(foreach_norm(some, norm_type, _wide(device))).tolist()
    return found


def _magnitudes(grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor with the norm of ``grad`` in a dtype that supports norms. Yields nothing if ``grad`` is empty."""
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    if grad.is_complex():
        grad = grad.abs()
    elif grad.element_size() == 1:
        grad = grad.float()
    if grad.numel():
        yield grad


def _multiply(grad: torch.Tensor, scale: float) -> None:
    if grad.element_size() == 1:  # torch has no arithmetic for 8-bit floats
        grad.copy_(grad.float() * scale)
    else:
        grad.mul_(scale)


def _wide(device: torch.device) -> torch.dtype:
    """Double precision if the device has it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
