"""Gradients that there are not: told from zeros at the end of a message, and compared with what was agreed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ldt.errors import LdtError
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["AbsentGrads", "with_absent", "without_absent"]

_STATE = "if a state that this depends on was changed since the last step, call pipeline.forget_shapes() on every rank"


def with_absent(specs: Sequence[TensorSpec], arrived: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each tensor of a hop, None where there is none, given what ``backward_specs(specs)`` brought.

    Waits for the device where a gradient is in doubt.
    """
    grads = iter(arrived)
    in_doubt = any(spec.requires_grad and spec.used is None for spec in specs)
    flags = iter(arrived[-1].tolist() if in_doubt else ())
    found: list[torch.Tensor | None] = []
    for spec in specs:
        grad = next(grads) if spec.requires_grad and spec.used is not False else None
        found.append(grad if grad is None or spec.used is True or next(flags) else None)
    return found


def without_absent(
    wanted: Sequence[TensorSpec],
    found: Sequence[torch.Tensor | None],
    zeros: Callable[[TensorSpec], torch.Tensor],
    device: torch.device,
) -> list[torch.Tensor]:
    """What ``with_absent`` reads, for the tensors ``wanted`` that require a gradient and those ``found``."""
    leaving = [
        zeros(spec) if grad is None else grad
        for spec, grad in zip(wanted, found, strict=True)
        if spec.used is not False
    ]
    doubts = [grad is not None for spec, grad in zip(wanted, found, strict=True) if spec.used is None]
    if doubts:
        flags = torch.zeros(len(doubts), dtype=torch.uint8, device=device)
        for flag, present in zip(flags, doubts, strict=True):
            flag.fill_(present)  # a copy from the host would wait for the device
        leaving.append(flags)
    return leaving


class AbsentGrads:
    """Of one step on one rank: where chunks give their inputs other gradients than was agreed.

    ``backwards`` has the number of them that the row has, by chunk.
    """

    def __init__(self, backwards: Mapping[int, int]) -> None:
        self._backwards = backwards
        self._given: dict[tuple[int, int], list[bool]] = defaultdict(list)

    def note(
        self,
        chunk: int,
        microbatch: int,
        wanted: Sequence[TensorSpec],
        found: Sequence[torch.Tensor | None],
    ) -> None:
        """The gradients that a backward ``found`` of inputs, before they are sent.

        Raises LdtError for one that was not to come, and at the last backward for an input that got zeros in place of
        no gradient in every microbatch.
        """
        for index, (spec, grad) in enumerate(zip(wanted, found, strict=True)):
            if spec.used is False and grad is not None:
                raise LdtError(
                    f"chunk {chunk} gives a gradient to its input {spec} ({index} of those that require one) for "
                    f"microbatch {microbatch}, but gave none when shapes were inferred, so nobody waits for it: "
                    f"{_STATE}; if it differs from microbatch to microbatch, give the module a method output_spec"
                )
            if spec.used is True and spec.nbytes:
                self._given[chunk, index].append(grad is not None)
                self._check(chunk, index)

    def _check(self, chunk: int, index: int) -> None:
        given = self._given[chunk, index]
        if not any(given) and len(given) == self._backwards[chunk]:
            raise LdtError(
                f"chunk {chunk} gave no gradient to its input ({index} of those that require one) in any microbatch of "
                "this step, but was expected to: parameters before it would get zeros where the whole model has none: "
                f"{_STATE}; if zeros will do, add 0 * input to the output where it is not used"
            )
