"""What all ranks must know to build and train one model. The edge has it, and ``hf.build`` sends it to the cloud."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ldt.schema import fit
from ldt.topology import Topology

__all__ = ["Adapter", "Optimizer", "Settings"]

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
_MOST = 100_000  # microbatches, or ranks of an adapter: more would keep ranks busy for minutes
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of every rank. ``betas`` and ``eps`` are for the kinds of Adam, ``momentum`` is for SGD.

    Attributes:
        name: ``"adamw"`` is torch's, ``"adamw_8bit"`` that of bitsandbytes, which keeps its state in 8 bits.
        lr: The highest learning rate. The edge's scheduler changes it on every rank.
        weight_decay: Of all weights but biases and those of norms.
    """

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters (LoRA) of ``peft`` on every linear layer that ``targets`` names; the rest is frozen.

    Attributes:
        rank: Of each adapter.
        alpha: The adapters' output is scaled by ``alpha / rank``. Default: twice the rank.
        dropout: Before each adapter.
        targets: Names of linear layers, as "q_proj"; ``"all-linear"`` for all but the head.
        four_bit: Keep the frozen linear layers in 4 bits (QLoRA), by bitsandbytes.
    """

    rank: int
    alpha: int | None = None
    dropout: float = 0.0
    targets: Literal["all-linear"] | list[str] = "all-linear"
    four_bit: bool = False

    @property
    def scaling(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


@dataclass(frozen=True)
class Settings:
    """How a model is split, built and trained, on every rank.

    Attributes:
        layers: The number of layers of each of the C = laps * P + 1 chunks; see ``hf.split``.
        laps: 1, or 2 for a vision-language model.
        weights: ``"checkpoint"`` loads each rank's part from its own disk, ``"random"`` draws it by ``seed``.
        seed: Of random weights and adapters, and on ranks that ``hf.follow`` of dropout.
        dtype: Of the weights; None for that of the edge's config.
        attention: The ``attn_implementation`` of transformers; None for its default.
        adapter: Train low-rank adapters instead of all weights.
        optimizer: That of every rank.
        checkpointing: Recompute the activations of each layer in its backward.
        compile: Compile each layer by ``torch.compile``.
        scaler: Scale gradients, as float16 needs it.
        loss_reduction: As for ``ldt.Pipeline``.
        microbatches: Of a step, if there is no ``plan``: the plan is then ``ldt.plan.ushape``'s.
        plan: The text of a plan, ``Plan.to_text()``.
    """

    layers: list[int]
    laps: int = 1
    weights: Literal["checkpoint", "random"] = "checkpoint"
    seed: int = 0
    dtype: DtypeName | None = None
    attention: Attention | None = None
    adapter: Adapter | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpointing: bool = False
    compile: bool = False
    scaler: bool = False
    loss_reduction: Literal["mean", "sum", "token"] = "token"
    microbatches: int | None = None
    plan: str | None = None

    def to_json(self) -> dict[str, Any]:
        """An object that ``from_json`` reads."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # with lists for tuples
        return found

    @classmethod
    def from_json(cls, value: Any) -> Settings:
        """Inverse of ``to_json``. Raises ValueError for other fields, or other types in them."""
        settings: Settings = fit(value, cls, "settings")
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ValueError for a value that no model can have."""
        rank, alpha = (None, None) if self.adapter is None else (self.adapter.rank, self.adapter.alpha)
        positive = {"microbatches": self.microbatches, "adapter.rank": rank, "adapter.alpha": alpha}
        for name, value in positive.items():
            if value is not None and not 1 <= value <= _MOST:
                raise ValueError(f"{name} must be from 1 to {_MOST}, got {value}")
        for name in ("lr", "weight_decay"):
            if not getattr(self.optimizer, name) >= 0:
                raise ValueError(f"optimizer.{name} must be at least 0, got {getattr(self.optimizer, name)}")
        if self.adapter is not None and not 0 <= self.adapter.dropout < 1:
            raise ValueError(f"adapter.dropout must be at least 0 and below 1, got {self.adapter.dropout}")

    @staticmethod
    def evenly(layers: int, topology: Topology) -> list[int]:
        """Divide ``layers`` over the chunks of ``topology``, of one lap; the first get what is left over."""
        number = topology.num_chunks
        return [layers // number + (index < layers % number) for index in range(number)]
