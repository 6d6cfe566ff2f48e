"""Combines the losses of microbatches and scales their gradients by microbatches or tokens."""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch

from ldt._torch_private import tree_leaves
from ldt.errors import LdtError
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.control.edge_broadcast import EdgeBroadcast
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.execution.metrics import split_metrics
from ldt.runtime.model.loss_module import check_trained_leaves
from ldt.runtime.step.audit import Audit
from ldt.runtime.step.call import Call

__all__ = ["LossFn", "LossOptions", "LossReduction", "StepLoss", "TokenScale"]

_COUNT = struct.Struct("<d")  # number of tokens, on the wire
LossReduction = Literal["mean", "sum", "token", "root"]
Scale = Callable[[torch.Tensor], Any]
LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LossOptions:
    """The arguments of ``Pipeline`` about the loss. Functions and ``grad_scaler`` are needed on the edge only."""

    function: LossFn | None
    reduction: LossReduction
    grad_scaler: torch.amp.GradScaler | None = None
    scale_root: Scale | None = None

    def check(self) -> None:
        """Raise ValueError for an unknown reduction, and TypeError for torch's own GradScaler.

        That one does not see overflows on other stages.
        """
        if self.reduction not in get_args(LossReduction):
            raise InputValueError(
                f"loss_reduction must be 'mean', 'sum', 'token' or 'root', got {self.reduction!r}"
            )
        if self.scale_root is not None and not callable(self.scale_root):
            raise InputTypeError(f"scale_root must be a function, got {type(self.scale_root).__name__}")
        if self.scale_root is not None and self.grad_scaler is not None:
            raise InputValueError(
                "both grad_scaler and scale_root scale what backwards start from: give one of them"
            )
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "over_stages"):
            raise InputTypeError(
                f"grad_scaler must be an ldt.GradScaler, got {type(self.grad_scaler).__name__}: make "
                "ldt.GradScaler(mesh) with the same options on every rank"
            )

    @property
    def per_token(self) -> bool:
        """Whether gradients are divided by the number of tokens at the end of the step."""
        return self.reduction == "token"

    @property
    def counts(self) -> bool:
        """Whether ``loss_fn`` returns a count with the loss, the sum of which all ranks get."""
        return self.reduction in ("token", "root")

    @property
    def scale(self) -> Scale | None:
        """What scales the tensors that backwards start from."""
        return self.scale_root if self.grad_scaler is None else self.grad_scaler.scale


class StepLoss:
    """The losses and metrics of one step on one edge rank.

    Whatever the reduction, ``loss_fn`` may return a dict of metrics as well, as the last part of a tuple.

    "mean": ``loss_fn`` returns a microbatch's mean. Each backward starts at that mean divided by the number of
    microbatches, so gradients are bit-equal to those of ``for mb: (loss_fn(model(x), y) / M).backward()``.
    "sum": ``loss_fn`` returns a microbatch's sum. Backwards start at the sums, times the ``replicas`` of the edge, over
    which gradients are averaged later.
    "token": ``loss_fn`` returns (sum, count). Backwards start at the sums; at the end of the step all gradients are
    divided by the count of the whole step.
    "root": ``loss_fn`` returns (root, count). Backwards start at the roots, as for "sum", and nothing is divided.

    ``scale`` scales the tensor that a backward starts from, but not the reported losses. ``trained`` has the ``id`` of
    each parameter of the pipeline if gradients are changed after the backward.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        reduction: LossReduction,
        num_microbatches: int,
        scale: Scale | None = None,
        trained: Container[int] | None = None,
        replicas: int = 1,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._replicas = replicas
        self._loss_kwargs = loss_kwargs or {}
        self._scale = scale or (lambda loss: loss)
        self._trained = trained
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._num_microbatches = num_microbatches
        self._roots: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor | float] = {}
        self._metrics: dict[int, dict[str, torch.Tensor]] = {}
        self._read: dict[int, float] | None = None

    def forward(self, microbatch: int, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of a microbatch as the loss function returns it."""
        result, self._metrics[microbatch] = split_metrics(self._loss_fn(output, target, **self._loss_kwargs))
        loss, count = self._split(result) if self._reduction in ("token", "root") else (result, 1.0)
        _check_scalar(loss)
        # Clone: mse_loss and others return a view of the memory of all elements' losses.
        self._values[microbatch] = loss.detach().clone()
        self._counts[microbatch] = count
        self._read = None
        if torch.is_grad_enabled():
            _check_attached(loss, output, microbatch)
            if self._trained is not None and not self._roots:
                check_trained_leaves(loss, output, self._trained)
            self._roots[microbatch] = self._scale(self._root(loss))
        return loss

    def take_root(self, microbatch: int) -> torch.Tensor:
        """Remove and return the tensor that the backward of ``microbatch`` starts from."""
        return self._roots.pop(microbatch)

    def seed(self, microbatch: int) -> torch.Tensor:
        """What the gradients of the auxiliary losses of ``microbatch`` are scaled by, as its loss is."""
        one = torch.ones_like(self._values[microbatch], dtype=torch.float64).reshape(())
        count: Any = self._counts[microbatch] if self._reduction == "token" else 1.0
        seed: torch.Tensor = self._scale(self._root(one * count))
        return seed

    def weights(self) -> dict[int, float] | None:
        """The weight of each microbatch in the mean that the step minimizes; None if it minimizes a sum."""
        if self._reduction in ("sum", "root"):
            return None
        return self._numbers()

    def _root(self, loss: torch.Tensor) -> torch.Tensor:
        if self._reduction == "mean":
            return loss / self._num_microbatches
        return loss * self._replicas if self._reduction != "token" and self._replicas > 1 else loss

    @property
    def complete(self) -> bool:
        """True once every microbatch has run its forward."""
        return len(self._values) == self._num_microbatches

    @property
    def count(self) -> float:
        """Tokens of the step so far. Waits for the device once."""
        return sum(self._numbers().values())

    def per_microbatch(self) -> list[torch.Tensor]:
        """The mean loss of each microbatch that had a target, or its root."""
        if self._reduction == "root":
            return [self._values[index] for index in sorted(self._values)]
        counts = self._numbers()  # without tokens the sum is 0, and so is the mean
        return [self._values[index] / (counts[index] or 1.0) for index in sorted(self._values)]

    def metrics(self) -> dict[str, list[torch.Tensor]]:
        """The metrics by name, each of the microbatches that have it, in order."""
        found: dict[str, list[torch.Tensor]] = {}
        for index in sorted(self._metrics):
            for name, value in self._metrics[index].items():
                found.setdefault(name, []).append(value)
        return found

    def total(self) -> torch.Tensor:
        """The loss of the step on this rank: the mean over microbatches, the sum of losses or roots, or per token."""
        losses = [self._values[index] for index in sorted(self._values)]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total if self._reduction in ("sum", "root") else total / (self.count or 1.0)

    def _split(self, result: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            wanted = "root, count" if self._reduction == "root" else "sum of losses, number of tokens"
            raise InputValueError(
                f"with loss_reduction={self._reduction!r}, loss_fn must return ({wanted}), got {type(result).__name__}"
            )
        count = result[1]
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            return result[0], count.detach().reshape(())
        if isinstance(count, Real):
            return result[0], float(count)
        raise InputValueError(
            f"with loss_reduction={self._reduction!r}, loss_fn must return the number of tokens as a number or a "
            f"tensor of one, got {type(count).__name__}"
        )

    def _numbers(self) -> dict[int, float]:
        """The count of each microbatch, on the host."""
        if self._read is None:
            tensors = {
                index: count for index, count in self._counts.items() if isinstance(count, torch.Tensor)
            }
            numbers = torch.stack(list(tensors.values())).tolist() if tensors else []
            self._read = {**self._counts, **dict(zip(tensors, map(float, numbers), strict=True))}  # type: ignore[dict-item]
        return self._read


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InputValueError(f"loss_fn must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or loss.is_complex():
        raise InputValueError(
            f"loss_fn must return a real scalar tensor, got a tensor of shape {list(loss.shape)} and {loss.dtype}"
        )


def _check_attached(loss: torch.Tensor, output: Any, microbatch: int) -> None:
    """Raise ValueError if the loss is cut off from a model that requires gradients. A frozen model is fine."""
    if loss.requires_grad:
        return
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
        raise InputValueError(
            f"the loss of microbatch {microbatch} does not require a gradient although the output of the model does: "
            "does loss_fn use detach(), item(), no_grad() or argmax()? Compute the loss from the output itself"
        )


class TokenScale:
    """Divides the gradients of a step by its number of tokens, which only the edge knows.

    The edge's leaders broadcast it after their last loss, so it reaches the other ranks before their rows end.
    Gradients from before the step must be set aside meanwhile. Without ``parameters`` it only tells the number.
    """

    def __init__(
        self,
        edge_broadcast: EdgeBroadcast,
        call: Call,
        parameters: Iterable[torch.nn.Parameter],
        audit: Audit | None = None,
    ) -> None:
        self._edge_broadcast = edge_broadcast
        self._audit = audit
        self._call = call
        self._parameters = list(parameters)

    def broadcast(self, count: float) -> None:
        """Send ``count``, the number of tokens of this edge replica. Called on its leader."""
        edge_message = EdgeMessage(Subject.TOKENS, self._call.number, _COUNT.pack(count))
        self._edge_broadcast.send(edge_message)
        if self._audit is not None:
            self._audit.write("tokens", self._call.serial, edge_message.nbytes)

    def finish(self, replicas: int) -> float:
        """Turn sums (averaged over ``replicas`` of the edge) into the mean over the tokens of all replicas.

        Returns their number.
        """
        edge_messages = self._edge_broadcast.receive(Subject.TOKENS)
        count = sum(self._count_in(edge_message) for edge_message in edge_messages)
        for parameter in self._parameters:
            if parameter.grad is not None and count > 0:
                parameter.grad.mul_(replicas).div_(count) if replicas > 1 else parameter.grad.div_(count)
        return count

    def _count_in(self, edge_message: EdgeMessage) -> float:
        if edge_message.number != self._call.number or len(edge_message.content) != _COUNT.size:
            raise LdtError(
                f"expected the number of tokens of call {self._call.number}, got {len(edge_message.content)} bytes "
                f"about call {edge_message.number}: do all ranks run one version of ldt?"
            )
        count: float = _COUNT.unpack(edge_message.content)[0]
        return count
