"""The norm of all gradients of a model whose parameters are spread over stages."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ldt.runtime.mesh import Mesh

__all__ = ["clip_grad_norm_"]

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, mesh: Mesh
) -> torch.Tensor:
    """Scale the gradients of the whole model so that their 2-norm is at most ``max_norm``.

    ``parameters`` are this rank's. A collective call of all ranks, to be made after ``Pipeline.step``, when replicas
    have equal gradients; one small message over the control plane. Parameters that the ranks of a stage hold alike
    count once. Returns the norm before clipping, the same on every rank: that of ``torch.nn.utils.clip_grad_norm_``
    on the unsplit model but for the order of the sum, which is made in double precision.
    """
    mesh.check_usable()
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    squares = sum((float(torch.linalg.vector_norm(grad, dtype=_wide(grad))) ** 2 for grad in grads), 0.0)
    counts = mesh.is_leader and mesh.replica == 0
    (total,) = mesh.control.sum([squares if counts else 0.0])
    norm = total**0.5
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # also when the norm is not finite, as in torch
        for grad in grads:
            grad.mul_(scale)
    return torch.tensor(norm, device=mesh.device)


def _wide(grad: torch.Tensor) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float64 if grad.device.type in ("cpu", "cuda") else torch.float32
