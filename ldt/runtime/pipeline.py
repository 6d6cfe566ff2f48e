"""The pipeline: this rank's chunks on a mesh, with step() and eval()."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.plan import Costs, Plan
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.aliasing import Aliasing
from ldt.runtime.execution.edge_chunks import make_runner
from ldt.runtime.execution.executor import Executor
from ldt.runtime.execution.grad_hooks import check_gradients
from ldt.runtime.execution.grad_reduce import EarlierGradients
from ldt.runtime.execution.loss import LossFn, LossReduction, StepLoss, TokenScale
from ldt.runtime.execution.nan_check import NanCheck
from ldt.runtime.execution.profile_costs import measure_costs
from ldt.runtime.execution.recorder import Recorder
from ldt.runtime.execution.step_result import StepResult, StepStats
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.execution.step_stats import StepStatsCollector
from ldt.runtime.execution.stream_timer import StreamTimer
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.divergence import DivergenceCheck
from ldt.runtime.pipeline_setup import Given, WeightOptions, agree_on_ties, agreed_parts
from ldt.runtime.step.announce import Announcer
from ldt.runtime.step.audit import Guard
from ldt.runtime.step.call import Call, Mode, StepRejected
from ldt.runtime.step.handshake import Handshake
from ldt.runtime.step.microbatch import Microbatch, parse_microbatches
from ldt.runtime.step.plan_cache import PlanFactory
from ldt.runtime.step.shape_cache import ShapeCache
from ldt.runtime.step.validate import validate_chunks

__all__ = ["Pipeline"]


class Pipeline:
    """Runs a model that is split into chunks over the nodes of a mesh.

    ``chunks`` are this rank's modules in model order, on ``mesh.device``. ``plan``, any that ``ldt.plan.verify``
    accepts, says who does what when: a step of another number of microbatches is refused. ``plan_factory(topology,
    num_microbatches, training)`` makes the plans that are not given, on each rank for itself; a step fails if ranks
    then have different ones. Without it they are ``ldt.plan.ushape``'s: for eval, and if no plan is given.
    ``loss_fn(output, target)`` is needed on the edge and used only there: with ``loss_reduction="mean"`` it gives the
    microbatch's mean, with "token" its sum and its number of tokens. Its parameters, if it is a module or refers to
    some, are trained as those of the last chunk.
    ``grad_scaler``, an ``ldt.GradScaler``, is needed on the edge: it scales what backwards start from.
    ``free_outputs`` frees what a chunk returned once it was sent, keeping its graph. ``audit``, a path, on the edge
    writes a line there for all that leaves it, and looks for copies of samples and labels, too; their own memory is
    never sent. ``check_finite`` looks at what each action computes: outputs of chunks, the loss, and the gradients of
    inputs and parameters, but these not with a ``grad_scaler``, as they may overflow then. The first that has a NaN or
    an infinity raises NonFiniteError on its rank before it is sent, and RemoteStageError with the same text elsewhere;
    -inf passes in outputs, where masks have it. It costs a pass over all of these, and on a device a wait of the host
    in each action that computes, two in the last chunk's forward.

    Ranks that hold the same weights, those of a stage and its replicas, must begin with equal parameters and buffers:
    LdtError on every rank names one that differs, and where. ``sync_weights`` gives them those of the first of these
    ranks instead. A trainable parameter on two stages, or two tensors of what was one on a stage, are an LdtError that
    names both: known by the name in the whole model, or by equal values together with what holds them (see
    ``ldt.runtime.model.tie_evidence``), which ``allow_equal_weights`` leaves out. What is only alike is logged.
    ``check_weights=False``, for weights that are loaded later, compares nothing but what ``sync_weights`` sends.

    Before each call replicas get the buffers of the first, but with ``sync_buffers=False``: those in a ``state_dict``,
    such as running statistics. Chunks in DistributedDataParallel do as its ``broadcast_buffers`` says, with all.

    Building one is a collective call: if the arguments are wrong on one rank, every rank raises.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        *,
        loss_reduction: LossReduction = "mean",
        free_outputs: bool = True,
        plan_factory: PlanFactory | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        audit: str | Path | None = None,
        check_finite: bool = False,
        check_weights: bool = True,
        sync_weights: bool = False,
        allow_equal_weights: bool = False,
        sync_buffers: bool = True,
    ) -> None:
        self._mesh = mesh
        self._loss_fn = loss_fn
        self._reduction: LossReduction = loss_reduction
        self._scaler = grad_scaler
        self._serial = 0
        self._options = WeightOptions(check_weights, sync_weights, allow_equal_weights, sync_buffers)
        given = Given(chunks, plan, plan_factory, loss_fn, loss_reduction, grad_scaler, audit, self._options)
        parts, answers = agreed_parts(mesh, given)
        modules, self._plans, self._audit = parts.modules, parts.plans, parts.audit
        self._loss_module, self._buffers = parts.loss_module, parts.buffers
        wanted = sorted({name for answer in answers for name in answer.metadata})
        all_reads = {chunk: found for answer in answers for chunk, found in answer.reads.items()}
        scaled = any(answer.scaled for answer in answers)  # the edge's scaler is in the gradients of all
        self._nan_check = NanCheck(activations=check_finite, gradients=check_finite and not scaled)
        self._divergence = DivergenceCheck(mesh) if mesh.topology.tp[mesh.stage] > 1 else None
        self._number = mesh.count_pipeline()
        aliasing = Aliasing(mesh.watchdog.store, f"{mesh.watchdog.key}/pipeline-{self._number}")
        self._runners = {
            index: make_runner(mesh, index, module, free_outputs, self._loss_module, aliasing)
            for index, module in modules.items()
        }
        self._shapes = ShapeCache(mesh, modules, all_reads, self._number, self._loss_module is not None)
        announcer = Announcer(mesh, self._shapes, self._plans, wanted, self._audit) if mesh.is_edge else None
        self._handshake = Handshake(mesh, self._shapes, self._plans, announcer)
        self._guard: Guard | None = None

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """This rank's modules, in model order."""
        return tuple(runner.module for runner in self._runners.values())

    @property
    def loss_module(self) -> nn.Module | None:
        """What holds the parameters and buffers of ``loss_fn``, on the edge; None where there are none."""
        return self._loss_module

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's chunks, shared ones once: for an optimizer and ``clip_grad_norm_``.

        On the edge those of ``loss_fn``, too.
        """
        return iter(
            dict.fromkeys(p for runner in self._runners.values() for _, p in runner.named_parameters())
        )

    def plan(self, num_microbatches: int, *, training: bool = True) -> Plan:
        """The plan that a step (or eval) of so many microbatches runs."""
        return self._plans.get(num_microbatches, training)

    def forget_shapes(self) -> None:
        """Call on every rank after freezing or unfreezing layers: what hops carry is then found anew.

        Raises LdtError on every rank if a weight that is trained from now on is on two stages, as ``Pipeline()`` does.
        """
        self._shapes.forget()
        agree_on_ties(self._mesh, self._shapes.chunks, self._options)

    def step(self, microbatches: Any = None, *, upcoming: Any = None) -> StepResult:
        """Forward and backward of all microbatches. A collective call of all ranks of the mesh.

        On the edge ``microbatches`` are (inputs, target) pairs; cloud ranks give none. Leaves the gradient of the mean
        in ``.grad``, adding to what is there, and calls no optimizer. Gradients are computed also under ``no_grad``.
        ``upcoming``, on the edge, are the microbatches of the next step, where they are known: all ranks are then told
        of them while this step runs. The next call must be that step, with the same list.

        Raises ValueError or TypeError on the edge for bad microbatches, PlanError for a number of them that the given
        plan is not for, LdtError under ``torch.inference_mode``, and RemoteStageError on the other ranks; the pipeline
        stays usable. If anything fails after that, the rank it failed on raises it, all others raise
        RemoteStageError saying which and where, and the mesh cannot be used any more. What of an exception on the edge
        they are told is a matter of ``connect(share_edge_errors=...)``.
        """
        return self._call("step", microbatches, upcoming=upcoming)

    def eval(self, microbatches: Any = None) -> StepResult:
        """Forward only, without gradients; ``outputs`` are kept on the edge. Raises as ``step`` does.

        A target may be None; the loss is that of the microbatches that have one. Modules are not switched to eval mode.
        """
        return self._call("eval", microbatches)

    def validate(self, microbatches: Any = None, *, training: bool = True) -> list[list[HopSpecs]]:
        """Check all boundaries between stages for these microbatches, given on the edge as for ``step``, without one.

        Every chunk is run on fake tensors: no data, no compute. Returns what hops will carry:
        ``hops[m][c]`` is for microbatch m and hop c -> c+1, empty within a node. A collective call of all ranks, for
        steps, or without ``training`` for evals.

        Raises as ``step`` does, and LdtError on the rank where a chunk does not take what comes, or returns other
        tensors than it declares, naming chunk, tensor and both shapes; RemoteStageError with that text on the others.
        """
        self._mesh.check_usable()
        with self._mesh.calling("validate()"):
            try:
                self._serial += 1
                mode: Mode = "step" if training else "eval"
                call = self._new_call(mode, microbatches)
                context = self._handshake.open(call)
                validate_chunks(self._mesh, self._shapes, context, call.microbatches, training)
                self._mesh.control.all_gather(None)  # nobody leaves before all have found nothing
            except StepRejected as rejected:
                raise rejected.error from None
            except BaseException as error:
                self._mesh.fail(error, "validate()")
        return [list(hops) for hops in context.hops]

    def gather_stats(self, result: StepResult) -> list[StepStats] | None:
        """The stats of ``result`` of all ranks, on the edge; None elsewhere. A collective call."""
        with self._mesh.collective("gather_stats()"):
            found: list[StepStats] = self._mesh.control.all_gather(
                result.stats.to_json(), StepStats.from_json
            )
        return found if self._mesh.is_edge else None

    def measure_costs(self, microbatches: Any = None, steps: int = 3) -> Costs:
        """What this pipeline's steps cost, for ``ldt.plan.optimize``: equal on every rank. A collective call.

        Runs ``steps`` + 1 steps of ``microbatches``, given on the edge as for ``step``, and probes each link.
        Gradients stay as they are; buffers and random states move on as in training. Compute in seconds per chunk, of
        the slowest rank that has it; latency (one way), bandwidth and bytes per hop. On a device with streams, an
        action costs what it takes on its stream, which includes how late the host is with its kernels.
        """
        device = self._mesh.device
        return measure_costs(
            self._mesh,
            lambda batch: (
                self._call("step", batch, None if device.type == "cpu" else StreamTimer(device)).stats
            ),
            microbatches,
            steps,
            self.parameters(),
        )

    # -- internal --------------------------------------------------------------------------------------------

    def _call(
        self, mode: Mode, given: Any, timer: StreamTimer | None = None, upcoming: Any = None
    ) -> StepResult:
        self._mesh.check_usable()
        with self._mesh.calling(f"{mode}()"):
            return self._run(mode, given, upcoming, Recorder(timer))

    def _run(self, mode: Mode, given: Any, upcoming: Any, recorder: Recorder) -> StepResult:
        executor: Executor | None = None
        try:
            stats_collector = StepStatsCollector(self._mesh)
            self._serial += 1
            call = self._new_call(mode, given)
            later = None if upcoming is None else self._new_call(mode, upcoming, ahead=1)
            context = self._handshake.open(call, later)
            work = StepState(
                context.plan, context.hops, context.keywords, call.serial, nan_check=self._nan_check
            )
            work.divergence = self._divergence
            if call.microbatches is not None:
                work.microbatches = call.microbatches
                work.loss = self._loss_of(len(call.microbatches))
                work.guard = self._guard = Guard(call.microbatches, self._audit is not None, self._guard)
            work.keep_outputs = mode == "eval"
            executor = Executor(self._mesh, self._runners, work, recorder, self._audit)
            self._execute(executor, work, call)
            recorder.finish()
            if self._guard is not None:
                self._guard.end()
            return self._result(work, stats_collector.collect(executor))
        except StepRejected as rejected:
            raise rejected.error from None
        except BaseException as error:
            self._clean_up()
            if executor is None:
                self._mesh.fail(error, f"the beginning of {mode}()")
            self._mesh.fail(error, executor.position, executor.error_context())

    def _new_call(self, mode: Mode, given: Any, ahead: int = 0) -> Call:
        """The call that runs now, or the one that comes ``ahead`` calls later, with this rank's microbatches."""
        serial = self._serial + ahead
        try:
            if mode == "step" and ahead == 0:
                self._check_training()
            microbatches = self._parse(mode, given)
        except Exception as caught:
            return Call(mode, serial, None, self._number, caught)
        return Call(mode, serial, microbatches, self._number)

    def _check_training(self) -> None:
        if torch.is_inference_mode_enabled():
            raise LdtError("step() computes gradients and cannot run under torch.inference_mode(): leave it")
        modules = {index: runner.module for index, runner in self._runners.items()}
        check_gradients(modules, self._loss_module, self._mesh, self._reduction == "token")
        if self._mesh.is_edge and self._loss_fn is None:
            raise InputValueError("step() needs a loss on the edge: give Pipeline(..., loss_fn=...) there")

    def _parse(self, mode: Mode, given: Any) -> list[Microbatch] | None:
        if self._mesh.is_edge:
            return parse_microbatches(given)
        if given is not None:
            raise InputValueError(
                f"microbatches were given on a rank of stage {self._mesh.stage}: only the edge, stage 0, has "
                f"samples; call {mode}() without arguments here"
            )
        return None

    def _loss_of(self, num_microbatches: int) -> StepLoss | None:
        if self._loss_fn is None:
            return None
        options: dict[str, Any] = {} if self._scaler is None else {"scale": self._scaler.scale}
        if self._changes_gradients:
            options["trained"] = set(map(id, self.parameters()))
        return StepLoss(self._loss_fn, self._reduction, num_microbatches, **options)

    @property
    def _changes_gradients(self) -> bool:
        """Whether a step divides or averages those that its backwards left."""
        return self._reduction == "token" or self._mesh.topology.dp > 1

    def _execute(self, executor: Executor, step: StepState, call: Call) -> None:
        training = step.plan.training
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            scale: TokenScale | None = None
            earlier = EarlierGradients(self.parameters() if training and self._changes_gradients else ())
            if training and self._reduction == "token":
                scale = TokenScale(self._mesh.edge_broadcast, call, self.parameters(), self._audit)
                if self._mesh.is_edge and self._mesh.is_leader:
                    step.token_scale = scale
            try:
                self._buffers.run()
                executor.run()
                if scale is not None:
                    scale.finish(self._mesh.topology.edge_dp)
            finally:
                earlier.add_back()

    def _result(self, step: StepState, stats: StepStats) -> StepResult:
        result = StepResult(stats)
        if step.loss is not None and step.loss.per_microbatch():
            result.loss = step.loss.total()
            result.losses = step.loss.per_microbatch()
        if step.keep_outputs and self._mesh.is_edge:
            result.outputs = [step.outputs[index] for index in sorted(step.outputs)]
        return result

    def _clean_up(self) -> None:
        for runner in self._runners.values():
            runner.drop()
