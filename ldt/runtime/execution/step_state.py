"""State of one step on one rank: its plan, the specs of its hops, and on the edge samples and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ldt.plan import Plan
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.loss import StepLoss, TokenScale
from ldt.runtime.execution.nan_check import NanCheck
from ldt.runtime.execution.observer import Observer
from ldt.runtime.model.divergence import DivergenceCheck
from ldt.runtime.step.audit import Guard
from ldt.runtime.step.microbatch import Microbatch

__all__ = ["StepState"]


@dataclass
class StepState:
    """``hops[m][c]`` is what hop c -> c+1 carries for microbatch m; ``keywords[m]`` are its keyword inputs."""

    plan: Plan
    hops: Sequence[Sequence[HopSpecs]]
    keywords: Sequence[Mapping[str, Any]]
    serial: int = 0  # serial number of the call
    microbatches: Sequence[Microbatch] = ()  # on the edge
    loss: StepLoss | None = None  # on the edge
    token_scale: TokenScale | None = None  # on the edge's leader, which broadcasts the number of tokens
    guard: Guard | None = None  # on the edge: refuses to send samples and labels
    nan_check: NanCheck = field(default_factory=NanCheck)
    divergence: DivergenceCheck | None = None  # where a stage has several ranks
    outputs: dict[int, Any] = field(default_factory=dict)  # outputs of the tail, with keep_outputs
    keep_outputs: bool = False
    on_edge: bool = False
    auxiliary: dict[str, dict[int, torch.Tensor]] = field(
        default_factory=dict
    )  # on the edge, by name and microbatch
    reduce_gradients: bool = True
    observer: Observer | None = None
    count: float | None = None  # at the end of a step: that of the loss function over all replicas
