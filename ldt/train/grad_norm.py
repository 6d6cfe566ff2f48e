"""The norm of all gradients of a model whose parameters are spread over stages, ranks and replicas."""

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

    ``parameters`` are this rank's. A collective call of all ranks, to be made after ``Pipeline.step``, when replicas
    have equal gradients; one small message over the control plane, and one wait for the device.
    Every element counts once: plain tensors, which all ranks of a stage and all replicas hold alike, on one rank;
    shards (DTensor, as ``parallelize_module`` and ``fully_shard`` make them over ``mesh.tp_mesh`` and
    ``mesh.dp_mesh``) on the ranks that hold them, and so parameters marked ``tensor_model_parallel=True``, as those
    of Megatron's layers are, of which each rank of a stage has another part.
    Returns the norm before clipping, the same on every rank: that of ``torch.nn.utils.clip_grad_norm_``
    on the unsplit model but for the order of the sum, which is made in double precision. ``norm_type`` is as there, but
    positive, else ValueError. Its dtype is float32, or float64 where a gradient here has that.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise InputValueError(f"norm_type must be a positive number or infinity, got {norm_type}")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    pairs = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
    with mesh.collective("clip_grad_norm_()"):
        whole = [
            (tensor, _without_partial(grad)) for tensor, grad in pairs
        ]  # a collective of the ranks of each: on all of them
        norms = _norms(
            [_local(grad) for tensor, grad in whole if _counts_here(tensor, grad, mesh)], norm_type
        )
        norm = _norm_over_ranks(norms, norm_type, mesh)
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # also when the norm is not finite, as in torch
        for _, grad in pairs:
            _multiply(grad, scale)
    dtypes = (grad.dtype.to_real() for _, grad in pairs if grad.element_size() > 1)
    return torch.tensor(
        norm, dtype=functools.reduce(torch.promote_types, dtypes, torch.float32), device=mesh.device
    )


def _norm_over_ranks(norms: list[float], norm_type: float, mesh: Mesh) -> float:
    """That of all ranks' ``norms``, of which each has those of its own tensors."""
    if math.isinf(norm_type):
        largest = mesh.control.all_gather(_largest(norms), float)
        return _largest(largest)
    (total,) = mesh.control.sum([sum(norm**norm_type for norm in norms)])
    return float(total ** (1.0 / norm_type))


def _largest(norms: list[float]) -> float:
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def _counts_here(tensor: torch.Tensor, grad: torch.Tensor, mesh: Mesh) -> bool:
    """True on the one rank, or one for each shard, whose elements of ``grad`` are counted."""
    first_in_node, first_replica = mesh.tp_rank == 0, mesh.replica == 0
    if not isinstance(grad, DTensor):
        return (first_in_node or is_tensor_parallel(tensor)) and first_replica
    place = zip(grad.device_mesh.get_coordinate() or (), grad.placements, strict=True)
    first = all(coordinate == 0 for coordinate, placement in place if isinstance(placement, Replicate))
    # Where its device mesh does not go, over the node or over replicas, it is the same everywhere.
    in_node = first_in_node or mesh.rank_info.spans_node(grad.device_mesh)
    return first and in_node and (first_replica or mesh.rank_info.spans_replicas(grad.device_mesh))


def _without_partial(grad: torch.Tensor) -> torch.Tensor:
    """With the sums made that are still to be made over its device mesh."""
    if not isinstance(grad, DTensor) or not any(isinstance(p, Partial) for p in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    )


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norms(grads: list[torch.Tensor], norm_type: float) -> list[float]:
    """Read from each device at once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).extend(_magnitudes(grad))
    found: list[float] = []
    for device, some in by_device.items():
        if some:
            found += torch.stack(foreach_norm(some, norm_type, _wide(device))).tolist()
    return found


def _magnitudes(grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of ``grad``, or what has their norm, in a type that norms are computed of; none if it is empty."""
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    if grad.is_complex():
        grad = grad.abs()
    elif grad.element_size() == 1:
        grad = grad.float()
    if grad.numel():
        yield grad


def _multiply(grad: torch.Tensor, scale: float) -> None:
    if grad.element_size() == 1:  # torch has no arithmetic for such
        grad.copy_(grad.float() * scale)
    else:
        grad.mul_(scale)


def _wide(device: torch.device) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
