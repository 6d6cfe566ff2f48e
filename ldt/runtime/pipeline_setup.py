"""How a pipeline is built: each rank checks what it was given, and all agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldt.plan import Plan
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.common.untrusted import as_str_dict, as_str_list
from ldt.runtime.execution.grad_hooks import check_gradients
from ldt.runtime.execution.loss import LossFn, LossReduction, check_reduction, check_scaler
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.buffer_sync import BufferSync
from ldt.runtime.model.data_parallel import check_equal_sharding, check_groups, sharding_of, unwrapped
from ldt.runtime.model.initial_weights import Weights
from ldt.runtime.model.keywords import metadata_accepted, metadata_read_by_output_spec
from ldt.runtime.model.loss_module import loss_module
from ldt.runtime.model.ties import Ties
from ldt.runtime.step.audit import Audit
from ldt.runtime.step.call import all_agree
from ldt.runtime.step.plan_cache import PlanCache, PlanFactory

__all__ = ["Given", "Own", "Parts", "WeightOptions", "agree_on_ties", "agreed_parts"]


@dataclass
class Own:
    """By chunk the parts of ``fully_shard`` and the metadata that shapes depend on; all metadata that chunks take."""

    sharding: Mapping[str, list[str]] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    reads: Mapping[str, list[str]] = field(default_factory=dict)
    scaled: bool = False  # by a GradScaler
    weights: Mapping[str, str] = field(default_factory=dict)  # digests by part
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of parameters, by chunk

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, value: Any) -> Own:
        """Raises TypeError or ValueError for anything else."""
        sharding, metadata, reads, scaled, weights, marks = value
        return cls(
            _by_chunk(sharding),
            as_str_list(metadata),
            _by_chunk(reads),
            bool(scaled),
            as_str_dict(weights),
            _by_chunk(marks),
        )


def _by_chunk(told: Any) -> dict[str, list[str]]:
    return {str(int(chunk)): as_str_list(found) for chunk, found in told.items()}


@dataclass(frozen=True)
class WeightOptions:
    """What ``Pipeline`` was told about weights: the same on every rank."""

    check_weights: bool = True
    sync_weights: bool = False
    allow_equal_weights: bool = False
    sync_buffers: bool = True

    def same(self) -> dict[str, str]:
        """For ``all_agree``."""
        return {f"values of {name}": str(bool(value)) for name, value in asdict(self).items()}


class WeightAgreement:
    """What all ranks must agree on of the weights of this one's ``modules``, and of its loss function."""

    def __init__(
        self, mesh: Mesh, modules: Mapping[int, nn.Module], of_loss: nn.Module | None, options: WeightOptions
    ) -> None:
        self._options = options
        places = {f"chunk {index}": module for index, module in modules.items()}
        if of_loss is not None:
            places["loss_fn"] = of_loss
        compares = options.check_weights or options.sync_weights
        self._weights = Weights(mesh, places if compares else {}, values=not options.sync_weights)
        self._ties = Ties(mesh, modules if options.check_weights else {})

    def tell(self, own: Own) -> None:
        own.weights, own.marks = self._weights.digests(), self._ties.marks()

    def settle(self, answers: Sequence[Own]) -> None:
        """Raise LdtError on every rank if weights differ that must be equal, or one is in two places; or send them."""
        self._weights.compare([answer.weights for answer in answers])
        self._ties.compare(
            [answer.marks for answer in answers], contents=not self._options.allow_equal_weights
        )
        if self._options.sync_weights:
            self._weights.broadcast_from_first()


@dataclass(frozen=True)
class Given:
    """What ``Pipeline`` was given on this rank."""

    chunks: Sequence[nn.Module]
    plan: Plan | None
    plan_factory: PlanFactory | None
    loss_fn: LossFn | None
    loss_reduction: LossReduction
    grad_scaler: torch.amp.GradScaler | None
    audit: str | Path | None
    options: WeightOptions


class Parts:
    """What a pipeline has on this rank, ``modules`` by chunk. Raises ValueError, TypeError or LdtError."""

    def __init__(self, mesh: Mesh, given: Given) -> None:
        self.modules = modules = _by_index(given.chunks, mesh)
        check_reduction(given.loss_reduction)
        check_scaler(given.grad_scaler)
        self.loss_module = loss_module(given.loss_fn) if mesh.is_edge else None
        if self.loss_module is not None:
            check_groups("loss_fn", self.loss_module, mesh.rank_info)
        check_gradients(modules, self.loss_module, mesh, given.loss_reduction == "token")
        self.plans = PlanCache(mesh.topology, mesh.lanes, given.plan, given.plan_factory)
        self.same = {
            "plans": self.plans.digest_of_all(),
            "values of loss_reduction": given.loss_reduction,
            **given.options.same(),
        }
        self.own = Own(
            sharding=sharding_of(modules),
            metadata=[] if mesh.is_edge else metadata_accepted(modules),
            reads=metadata_read_by_output_spec(modules),
            scaled=given.grad_scaler is not None,
        )
        self.weights = WeightAgreement(mesh, modules, self.loss_module, given.options)
        self.weights.tell(self.own)
        holders = [*given.chunks, *filter(None, [self.loss_module])]
        self.buffers = BufferSync(mesh, holders, plain=given.options.sync_buffers)
        self.audit = Audit(given.audit) if given.audit is not None and mesh.is_edge else None


def agreed_parts(mesh: Mesh, given: Given) -> tuple[Parts, list[Own]]:
    """This rank's, and what each rank told of its own. A collective call: if one rank cannot, every rank raises."""
    parts: Parts | None = None
    error: Exception | None = None
    try:
        parts = Parts(mesh, given)
    except Exception as caught:
        error = caught
    own, same = (Own(), {}) if parts is None else (parts.own, parts.same)
    try:
        answers: list[Own] = all_agree(mesh, "Pipeline()", error, same, own.to_json(), Own.from_json)
        assert parts is not None, "agree raises what was caught"
        parts.plans.require_lockstep(
            check_equal_sharding(mesh.rank_info, [answer.sharding for answer in answers])
        )
        parts.weights.settle(answers)
    except BaseException:
        if parts is not None and parts.audit is not None:
            parts.audit.discard()
        raise
    return parts, answers


def agree_on_ties(mesh: Mesh, modules: Mapping[int, nn.Module], options: WeightOptions) -> None:
    """As when a pipeline is built, for what is trained by now. A collective call: if one rank cannot, all raise."""
    call = "forget_shapes()"
    ties: Ties | None = None
    error: Exception | None = None
    try:
        ties = Ties(mesh, modules if options.check_weights else {}, call)
    except Exception as caught:
        error = caught
    marks = {} if ties is None else ties.marks()
    told = all_agree(mesh, call, error, {}, marks, _by_chunk)
    assert ties is not None, "agree raises what was caught"
    ties.compare(told, contents=not options.allow_equal_weights)


def _by_index(chunks: Sequence[nn.Module], mesh: Mesh) -> dict[int, nn.Module]:
    """Chunk number to module. Raises ValueError or TypeError if they are not this rank's."""
    wanted = mesh.topology.chunks_of(mesh.stage)
    if isinstance(chunks, nn.Module) and not isinstance(chunks, (nn.ModuleList, nn.Sequential)):
        raise InputTypeError(
            f"chunks must be a list of modules, got one {type(chunks).__name__}: write [module]"
        )
    modules = list(chunks)
    if len(modules) != len(wanted):
        raise InputValueError(
            f"stage {mesh.stage} of topology {mesh.topology.to_text()} has {len(wanted)} chunks "
            f"({', '.join(map(str, wanted))}), got {len(modules)} modules: give those of "
            "topology.chunks_of(mesh.stage)"
        )
    for index, module in zip(wanted, modules, strict=True):
        if not isinstance(module, nn.Module):
            raise InputTypeError(f"chunk {index} must be a torch.nn.Module, got {type(module).__name__}")
        check_groups(f"chunk {index}", module, mesh.rank_info)
    return dict(zip(wanted, map(unwrapped, modules), strict=True))
