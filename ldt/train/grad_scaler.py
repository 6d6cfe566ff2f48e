"""Scales the loss over all stages: a non-finite gradient on any of them skips the step on all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ldt.runtime.mesh.mesh import Mesh

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a mesh. Its other arguments are keywords, the same on every rank.

    Pass it to ``Pipeline(grad_scaler=...)``, which scales the loss, and call ``unscale_`` (before clipping), ``step``
    and ``update`` on every rank as in one process. ``unscale_`` (or ``step``, if ``unscale_`` was not called) is a
    collective call of all ranks, once per optimizer. All ranks need the same number of optimizers.
    """

    over_stages = True  # lets the pipeline, which must not import this module, recognize it

    def __init__(self, mesh: Mesh, **options: Any) -> None:
        super().__init__(mesh.device.type, **options)
        self._mesh = mesh
        self.scale(
            torch.zeros((), device=mesh.device)
        )  # creates the scale, also on ranks that never scale a loss

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
        """Unscale and look for non-finite gradients on all ranks; ``unscale_`` and ``step`` both call this.

        torch checks all gradients of a dtype together, which fails for a mix of DTensors and plain tensors. So this
        passes this rank's local parts.
        """
        with self._mesh.collective("GradScaler.unscale_()"):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts: Any = SimpleNamespace(param_groups=[{"params": list(map(_part_with_grad, parameters))}])
            found = super()._unscale_grads_(parts, *args)
            device = self._mesh.device
            found.setdefault(
                device, torch.zeros(1, device=device)
            )  # torch needs one even if all is frozen here
            (anywhere,) = self._mesh.control.sum([max(float(tensor) for tensor in found.values())])
        for tensor in found.values():
            tensor.fill_(anywhere > 0)
        return found


def _part_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    """Return ``parameter``, or a tensor whose ``grad`` is this rank's part of its gradient as real numbers."""
    grad = parameter.grad
    if grad is None or not (isinstance(grad, DTensor) or grad.is_complex()):
        return parameter
    if grad.is_conj():
        grad = parameter.grad = grad.resolve_conj()
    part = grad.to_local().detach() if isinstance(grad, DTensor) else grad.detach()
    if part.is_complex():
        part = torch.view_as_real(part)
    holder = part.detach()
    holder.grad = part
    return holder
