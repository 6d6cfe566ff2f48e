"""Checks the arguments of Pipeline() on each rank and compares them across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ldt.errors import LdtError
from ldt.plan import Plan
from ldt.runtime.common.peer_messages import as_str_dict, as_str_list
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.execution.grad_hooks import check_hooks_and_layers
from ldt.runtime.execution.loss import LossOptions
from ldt.runtime.execution.observer import Observer
from ldt.runtime.execution.profiler import Profile, check_profile
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
from ldt.topology import Topology

__all__ = ["PipelineArguments", "PipelineParts", "SetupSummary", "WeightOptions", "check_ties", "set_up"]


@dataclass
class SetupReport:
    """What one rank reports about its chunks. Mappings are by chunk, except ``weights``, which is by part.

    Attributes:
        sharding: Names of the submodules in ``fully_shard``.
        metadata: Names of all metadata that the chunks accept.
        reads: Names of the metadata that output shapes depend on.
        scaled: Whether there is a GradScaler.
        weights: Digests of parameters and buffers.
        marks: Marks of trainable parameters, see ``Ties``.
        profile: The first step to record and the one after the last; empty without a profile.
    """

    sharding: Mapping[str, list[str]] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    reads: Mapping[str, list[str]] = field(default_factory=dict)
    scaled: bool = False
    weights: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    profile: Sequence[int] = ()

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, value: Any) -> SetupReport:
        """Raises TypeError or ValueError for anything else."""
        sharding, metadata, reads, scaled, weights, marks, profile = value
        return cls(
            _by_chunk(sharding),
            as_str_list(metadata),
            _by_chunk(reads),
            bool(scaled),
            as_str_dict(weights),
            _by_chunk(marks),
            [int(step) for step in profile],
        )


def _by_chunk(value: Any) -> dict[str, list[str]]:
    return {str(int(chunk)): as_str_list(names) for chunk, names in value.items()}


class SetupSummary:
    """What the reports of all ranks say about the whole model.

    Attributes:
        metadata: Names of the metadata that any chunk on the cloud accepts, sorted.
        reads: By chunk the names of the metadata that its output shapes depend on.
        scaled: Whether the edge has a GradScaler, which scales the gradients of all ranks.
        profile: The steps to record, those of the edge; None if there are none.

    Raises LdtError, on all ranks, if the profiles of two ranks have other steps.
    """

    def __init__(self, reports: Sequence[SetupReport], topology: Topology) -> None:
        self.metadata = sorted({name for report in reports for name in report.metadata})
        self.reads = {chunk: names for report in reports for chunk, names in report.reads.items()}
        self.scaled = any(report.scaled for report in reports)
        self.profile = _profiled([list(report.profile) for report in reports], topology)


def _profiled(profiles: Sequence[list[int]], topology: Topology) -> range | None:
    """The steps to record. A rank of the cloud may leave them to the edge."""
    of_edge = profiles[0]
    for rank, steps in enumerate(profiles):
        if steps != of_edge and (steps or topology.node_of(rank).stage == 0):
            raise LdtError(
                f"all profiles must have the steps of the edge's, {_text(of_edge)}: rank {rank} of the topology has "
                f"{_text(steps)}"
            )
    return range(*of_edge) if of_edge else None


def _text(steps: list[int]) -> str:
    return str(range(*steps)) if steps else "none"


@dataclass(frozen=True)
class WeightOptions:
    """The arguments of ``Pipeline`` about weights. Equal on every rank."""

    check_weights: bool = True
    sync_weights: bool = False
    allow_equal_weights: bool = False
    sync_buffers: bool = True

    def required_equal(self) -> dict[str, str]:
        """The values that ``all_agree`` compares, by their name in texts."""
        return {f"values of {name}": str(bool(value)) for name, value in asdict(self).items()}


class WeightChecks:
    """Compares the weights of this rank's ``modules`` and of its loss function with those of the other ranks."""

    def __init__(
        self,
        mesh: Mesh,
        modules: Mapping[int, nn.Module],
        loss_module: nn.Module | None,
        options: WeightOptions,
    ) -> None:
        self._options = options
        parts = {f"chunk {index}": module for index, module in modules.items()}
        if loss_module is not None:
            parts["loss_fn"] = loss_module
        compares = options.check_weights or options.sync_weights
        self._weights = Weights(mesh, parts if compares else {}, values=not options.sync_weights)
        self._ties = Ties(mesh, modules if options.check_weights else {})

    def fill(self, report: SetupReport) -> None:
        """Add this rank's digests and marks to its report."""
        report.weights, report.marks = self._weights.digests(), self._ties.marks()

    def compare(self, reports: Sequence[SetupReport]) -> None:
        """Compare weights and ties, then send the weights with ``sync_weights``. A collective call.

        Raises LdtError on every rank if weights differ that must be equal, or one is in two places.
        """
        self._weights.compare([report.weights for report in reports])
        self._ties.compare(
            [report.marks for report in reports], contents=not self._options.allow_equal_weights
        )
        if self._options.sync_weights:
            self._weights.broadcast_from_first()


@dataclass(frozen=True)
class PipelineArguments:
    """The arguments of ``Pipeline`` on this rank that are checked."""

    chunks: Sequence[nn.Module]
    plan: Plan | None
    plan_factory: PlanFactory | None
    loss: LossOptions
    audit: str | Path | None
    weights: WeightOptions
    profile: Profile | None = None
    reduce_gradients: bool = True
    observer: Observer | None = None


class PipelineParts:
    """The parts of a pipeline that follow from its arguments; ``modules`` is by chunk, without wrappers.

    Raises ValueError, TypeError or LdtError for arguments that are wrong on this rank.
    """

    def __init__(self, mesh: Mesh, arguments: PipelineArguments) -> None:
        self.modules = modules = _modules_by_chunk(arguments.chunks, mesh)
        arguments.loss.check()
        if not isinstance(arguments.observer, Observer | None):
            raise InputTypeError(f"observer must be an ldt.Observer, got {type(arguments.observer).__name__}")
        self.loss_module = loss_module(arguments.loss.function) if mesh.is_edge else None
        if self.loss_module is not None:
            check_groups("loss_fn", self.loss_module, mesh.rank_info)
        check_hooks_and_layers(modules, self.loss_module, mesh, arguments.loss.per_token)
        self.plans = PlanCache(mesh.topology, mesh.lanes, arguments.plan, arguments.plan_factory)
        self.required_equal = {
            "plans": self.plans.digest_of_all(),
            "values of loss_reduction": arguments.loss.reduction,
            "values of reduce_gradients": str(bool(arguments.reduce_gradients)),
            **arguments.weights.required_equal(),
        }
        self.report = SetupReport(
            sharding=sharding_of(modules),
            metadata=[] if mesh.is_edge else metadata_accepted(modules),
            reads=metadata_read_by_output_spec(modules),
            scaled=arguments.loss.scale is not None,
            profile=[] if arguments.profile is None else check_profile(arguments.profile),
        )
        self.weights = WeightChecks(mesh, modules, self.loss_module, arguments.weights)
        self.weights.fill(self.report)
        holders = [*arguments.chunks, *filter(None, [self.loss_module])]
        self.buffers = BufferSync(mesh, holders, plain=arguments.weights.sync_buffers)
        self.audit = Audit(arguments.audit) if arguments.audit is not None and mesh.is_edge else None


def set_up(mesh: Mesh, arguments: PipelineArguments) -> tuple[PipelineParts, SetupSummary]:
    """Check the arguments and compare them across ranks. A collective call: if one rank fails, every rank raises."""
    parts: PipelineParts | None = None
    error: Exception | None = None
    try:
        parts = PipelineParts(mesh, arguments)
    except Exception as caught:
        error = caught
    report, equal = (SetupReport(), {}) if parts is None else (parts.report, parts.required_equal)
    try:
        reports: list[SetupReport] = all_agree(
            mesh, "Pipeline()", error, equal, report.to_json(), SetupReport.from_json
        )
        assert parts is not None, "all_agree raises the error"
        shardings = [report.sharding for report in reports]
        parts.plans.require_lockstep(check_equal_sharding(mesh.rank_info, shardings))
        summary = SetupSummary(reports, mesh.topology)
        parts.weights.compare(reports)
    except BaseException:
        if parts is not None and parts.audit is not None:
            parts.audit.discard()
        raise
    return parts, summary


def check_ties(mesh: Mesh, modules: Mapping[int, nn.Module], options: WeightOptions) -> None:
    """Search for ties among the weights that are trained now. A collective call: if one rank fails, every rank raises.

    Raises LdtError as ``Pipeline()`` does.
    """
    call = "forget_shapes()"
    ties: Ties | None = None
    error: Exception | None = None
    try:
        ties = Ties(mesh, modules if options.check_weights else {}, call)
    except Exception as caught:
        error = caught
    marks = {} if ties is None else ties.marks()
    gathered = all_agree(mesh, call, error, {}, marks, _by_chunk)
    assert ties is not None, "all_agree raises the error"
    ties.compare(gathered, contents=not options.allow_equal_weights)


def _modules_by_chunk(chunks: Sequence[nn.Module], mesh: Mesh) -> dict[int, nn.Module]:
    """This rank's modules by chunk. Raises ValueError or TypeError if their number or type is wrong."""
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
