"""What one step is about, on one rank: its plan, what hops carry, and on the edge the samples and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ldt.plan import Plan
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.loss import StepLoss, TokenScale
from ldt.runtime.execution.nan_check import NanCheck
from ldt.runtime.model.divergence import DivergenceCheck
from ldt.runtime.step.audit import Guard
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["StepState"]


@dataclass
class StepState:
    """``hops[m][c]`` is what hop c -> c+1 carries for microbatch m, ``keywords[m]`` what chunks may get by name."""

    plan: Plan
    hops: Sequence[Sequence[HopSpecs]]
    keywords: Sequence[Mapping[str, Any]]
    serial: int = 0  # of the call
    microbatches: Sequence[Microbatch] = ()  # on the edge
    loss: StepLoss | None = None  # on the edge
    announced: TokenScale | None = None  # where the number of tokens is told to all: on the edge's leader
    guard: Guard | None = None  # on the edge: what must not leave it
    nan_check: NanCheck = field(default_factory=NanCheck)
    divergence: DivergenceCheck | None = None  # where a stage has several ranks
    outputs: dict[int, Any] = field(default_factory=dict)  # of the tail, where they are kept
    keep_outputs: bool = False
