"""Tells a missing gradient from one of zeros in a message, and compares it with what shape inference found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ldt.errors import LdtError
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["AbsentGrads", "pack_grads", "unpack_grads"]

_STATE = (
    "if it depends on state that changed since the last step, call pipeline.forget_shapes() on every rank"
)


def unpack_grads(specs: Sequence[TensorSpec], received: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each tensor of a hop, None where it has none.

    ``received`` are the tensors of ``backward_specs(specs)``. Waits for the device where a gradient may be absent.
    """
    grads = iter(received)
    in_doubt = any(spec.requires_grad and spec.used is None for spec in specs)
    flags = iter(received[-1].tolist() if in_doubt else ())
    found: list[torch.Tensor | None] = []
    for spec in specs:
        grad = next(grads) if spec.requires_grad and spec.used is not False else None
        found.append(grad if grad is None or spec.used is True or next(flags) else None)
    return found


def pack_grads(
    wanted: Sequence[TensorSpec],
    found: Sequence[torch.Tensor | None],
    zeros: Callable[[TensorSpec], torch.Tensor],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return the message that ``unpack_grads`` reads.

    ``wanted`` are the tensors that require a gradient, ``found`` their gradients. Zeros replace an absent gradient; a
    flag tensor at the end marks which of those in doubt are present.
    """
    message = [
        zeros(spec) if grad is None else grad
        for spec, grad in zip(wanted, found, strict=True)
        if spec.used is not False
    ]
    doubts = [grad is not None for spec, grad in zip(wanted, found, strict=True) if spec.used is None]
    if doubts:
        flags = torch.zeros(len(doubts), dtype=torch.uint8, device=device)
        for flag, present in zip(flags, doubts, strict=True):
            flag.fill_(present)  # copying from the host would wait for the device
        message.append(flags)
    return message


class AbsentGrads:
    """Finds inputs whose gradients differ from what shape inference found, in one step on one rank.

    ``backwards`` is the number of backwards in the row, by chunk.
    """

    def __init__(self, backwards: Mapping[int, int]) -> None:
        self._backwards = backwards
        self._given: dict[tuple[int, int], list[bool]] = defaultdict(list)

    def check(
        self,
        chunk: int,
        microbatch: int,
        wanted: Sequence[TensorSpec],
        found: Sequence[torch.Tensor | None],
    ) -> None:
        """Check the gradients ``found`` by a backward, before they are sent.

        Raises LdtError for a gradient that no rank expects, and at the last backward for an input that had no gradient
        in any microbatch and got zeros instead.
        """
        for index, (spec, grad) in enumerate(zip(wanted, found, strict=True)):
            if spec.used is False and grad is not None:
                raise LdtError(
                    f"chunk {chunk} gives a gradient to its input {spec} ({index} of those that require one) for "
                    f"microbatch {microbatch}, but gave none when shapes were inferred, so no rank receives it: "
                    f"{_STATE}; if it differs from microbatch to microbatch, give the module a method output_spec"
                )
            if spec.used is True and spec.nbytes:
                self._given[chunk, index].append(grad is not None)
                self._check_used(chunk, index)

    def _check_used(self, chunk: int, index: int) -> None:
        given = self._given[chunk, index]
        if not any(given) and len(given) == self._backwards[chunk]:
            raise LdtError(
                f"chunk {chunk} gave no gradient to its input ({index} of those that require one) in any microbatch of "
                "this step, but was expected to: parameters before it would get zeros where the whole model has none: "
                f"{_STATE}; if zeros are fine, add 0 * input to the output where the input is not used"
            )
