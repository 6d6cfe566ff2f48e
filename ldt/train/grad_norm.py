"""The norm of all gradients of a model whose parameters are spread over stages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ldt.errors import LdtError
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
    For layers that all ranks of a stage hold alike, which count once. Sharded ones (DTensor, as ``parallelize_module``
    and ``fully_shard`` make them) are not supported yet: LdtError on every rank, and no gradient is changed.
    Returns the norm before clipping, the same on every rank: that of ``torch.nn.utils.clip_grad_norm_``
    on the unsplit model but for the order of the sum, which is made in double precision.
    """
    mesh.check_usable()
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    sharded = sum(isinstance(tensor, DTensor) or isinstance(tensor.grad, DTensor) for tensor in tensors)
    counts = mesh.is_leader and mesh.replica == 0
    squares = _sum_of_squares(grads) if counts and not sharded else 0.0
    with mesh.calling("clip_grad_norm_()"):
        total, sharded_anywhere = mesh.control.sum([squares, sharded])
    if sharded_anywhere:
        raise LdtError(
            f"clip_grad_norm_ cannot handle sharded parameters (DTensor) yet: {sharded} on this rank, "
            f"{sharded_anywhere:g} on all ranks; clip with a norm of your own over mesh.tp_mesh and mesh.control"
        )
    norm = total**0.5
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # also when the norm is not finite, as in torch
        for grad in grads:
            grad.mul_(scale)
    return torch.tensor(norm, device=mesh.device)


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
