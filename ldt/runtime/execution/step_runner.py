"""Runs the calls of a pipeline: handshake, this rank's row of the plan, result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.execution.carried_losses import combined
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.executor import Executor
from ldt.runtime.execution.grad_hooks import check_hooks_and_layers
from ldt.runtime.execution.grad_reduce import EarlierGradients
from ldt.runtime.execution.loss import LossOptions, StepLoss, TokenScale
from ldt.runtime.execution.nan_check import NanCheck
from ldt.runtime.execution.observer import Observer
from ldt.runtime.execution.on_demand import Messages, OnDemand
from ldt.runtime.execution.profiler import Profiler
from ldt.runtime.execution.recorder import Recorder
from ldt.runtime.execution.step_result import StepResult, StepStats
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.execution.step_stats import StepStatsCollector
from ldt.runtime.execution.stream_timer import StreamTimer
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.model.buffer_sync import BufferSync
from ldt.runtime.model.divergence import DivergenceCheck
from ldt.runtime.step.audit import Audit, Guard
from ldt.runtime.step.call import Call, Mode, StepRejected
from ldt.runtime.step.first_use import FirstUse
from ldt.runtime.step.handshake import Handshake, StepContext
from ldt.runtime.step.microbatch import Microbatch, parse_microbatches
from ldt.runtime.step.shape_cache import ShapeCache
from ldt.runtime.step.validate import validate_chunks

__all__ = ["StepOptions", "StepRunner"]


@dataclass(frozen=True)
class StepOptions:
    """What the arguments of ``Pipeline`` say about its steps. ``loss_module`` has the parameters of the loss."""

    loss: LossOptions
    loss_module: nn.Module | None
    nan_check: NanCheck
    audit: Audit | None
    profiler: Profiler | None = None
    reduce_gradients: bool = True
    observer: Observer | None = None


class StepRunner:
    """Runs the calls of one pipeline on this rank.

    ``number`` is the number of the pipeline in its mesh, ``runners`` has this rank's chunks by index.
    """

    def __init__(
        self,
        mesh: Mesh,
        number: int,
        runners: Mapping[int, ChunkRunner],
        handshake: Handshake,
        buffers: BufferSync,
        options: StepOptions,
    ) -> None:
        self._mesh = mesh
        self._number = number
        self._runners = runners
        self._handshake = handshake
        self._buffers = buffers
        self._options = options
        self._divergence = DivergenceCheck(mesh) if mesh.topology.tp[mesh.stage] > 1 else None
        self._first_use = FirstUse(mesh.topology, mesh.device)
        self._serial = 0  # of the current call
        self._guard: Guard | None = None
        self._profiler = options.profiler

    def parameters(self) -> dict[nn.Parameter, None]:
        """The parameters of this rank's chunks and, on the edge, of the loss function, in order and each once."""
        return dict.fromkeys(p for runner in self._runners.values() for _, p in runner.named_parameters())

    def forget_shapes(self) -> None:
        """Kernels may load again: layers were frozen or unfrozen."""
        self._first_use.forget()

    def run(
        self,
        mode: Mode,
        microbatches: Any,
        upcoming: Any = None,
        *,
        keep_outputs: bool = False,
        loss_kwargs: Mapping[str, Any] | None = None,
        command: bytes = b"",
        timer: StreamTimer | None = None,
        profiled: bool = True,
    ) -> StepResult:
        """Run one step or eval. Without a ``timer`` times are the host's. See ``Pipeline.step`` for what it raises.

        Steps that are not ``profiled`` do not count for a profile.
        """
        self._mesh.check_usable()
        profiler = self._profiler if profiled and mode == "step" else None
        with self._mesh.calling(f"{mode}()"):
            executor: Executor | None = None
            try:
                if profiler is not None:
                    timer = profiler.begin_step()
                stats = StepStatsCollector(self._mesh)
                call, context = self._open(mode, microbatches, upcoming, command)
                step = self._step_state(call, context, keep_outputs, loss_kwargs or {})
                with closing(self._messages(context)) as messages:
                    recorder, audit = Recorder(timer), self._options.audit
                    executor = Executor(self._mesh, self._runners, step, messages, recorder, audit)
                    self._execute(executor, step, call)
                executor.recorder.finish()
                if self._guard is not None:
                    self._guard.end()
                result = self._result(step, stats.collect(executor))
                if profiler is not None and profiler.end_step(result.stats):
                    self._profiler = None
                return result
            except StepRejected as rejected:
                raise rejected.error from None
            except BaseException as error:
                for runner in self._runners.values():
                    runner.drop()
                if profiler is not None:
                    profiler.abort()
                if executor is None:
                    self._mesh.fail(error, f"the beginning of {mode}()")
                self._mesh.fail(error, executor.position, executor.error_context())

    def validate(self, shapes: ShapeCache, microbatches: Any, training: bool) -> StepContext:
        """Run every chunk on fake tensors. See ``Pipeline.validate`` for what it raises."""
        self._mesh.check_usable()
        with self._mesh.calling("validate()"):
            try:
                call, context = self._open("step" if training else "eval", microbatches)
                validate_chunks(self._mesh, shapes, context, call.microbatches, training)
                self._mesh.control.all_gather(None)  # no rank returns before all have passed
            except StepRejected as rejected:
                raise rejected.error from None
            except BaseException as error:
                self._mesh.fail(error, "validate()")
        return context

    def send_command(self, command: bytes) -> None:
        """Send a command that no step carries to ranks that follow. Called on the edge's leaders."""
        edge_message = EdgeMessage(Subject.COMMAND, 0, command=command)
        self._mesh.edge_broadcast.send(edge_message)
        if self._options.audit is not None:
            self._options.audit.write("command", self._serial, edge_message.nbytes)

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The grad scaler that the pipeline was given on this rank."""
        return self._options.loss.grad_scaler

    @property
    def loss(self) -> LossOptions:
        """The arguments of the pipeline about its loss, on this rank."""
        return self._options.loss

    # -- the call --------------------------------------------------------------------------------------------

    def _open(
        self, mode: Mode, microbatches: Any, upcoming: Any = None, command: bytes = b""
    ) -> tuple[Call, StepContext]:
        """Agree with all ranks on the next call, and announce the ``upcoming`` microbatches of the one after it."""
        self._serial += 1
        call = replace(self._new_call(mode, microbatches), command=command)
        following = None
        if upcoming is not None:
            following = replace(self._new_call(mode, upcoming, ahead=1), command=command)
        return call, self._handshake.open(call, following)

    def _new_call(self, mode: Mode, microbatches: Any, ahead: int = 0) -> Call:
        """The current call, or the one ``ahead`` calls later, with this rank's microbatches or what is wrong here."""
        serial = self._serial + ahead
        try:
            if mode == "step" and ahead == 0:
                self._check_training()
            parsed = self._parse(mode, microbatches)
        except Exception as caught:
            return Call(mode, serial, None, self._number, caught)
        return Call(mode, serial, parsed, self._number)

    def _check_training(self) -> None:
        if torch.is_inference_mode_enabled():
            raise LdtError("step() computes gradients and cannot run under torch.inference_mode(): leave it")
        options = self._options
        modules = {index: runner.module for index, runner in self._runners.items()}
        check_hooks_and_layers(modules, options.loss_module, self._mesh, options.loss.per_token)
        if self._mesh.is_edge and options.loss.function is None:
            raise InputValueError("step() needs a loss on the edge: give Pipeline(..., loss_fn=...) there")

    def _parse(self, mode: Mode, microbatches: Any) -> list[Microbatch] | None:
        if self._mesh.is_edge:
            return parse_microbatches(microbatches)
        if microbatches is not None:
            raise InputValueError(
                f"microbatches were given on a rank of stage {self._mesh.stage}: only the edge, stage 0, has "
                f"samples; call {mode}() without arguments here"
            )
        return None

    # -- the step --------------------------------------------------------------------------------------------

    def _step_state(
        self, call: Call, context: StepContext, keep_outputs: bool, loss_kwargs: Mapping[str, Any]
    ) -> StepState:
        step = StepState(
            context.plan, context.hops, context.keywords, call.serial, nan_check=self._options.nan_check
        )
        step.divergence, step.on_edge = self._divergence, self._mesh.is_edge
        step.reduce_gradients, step.observer = self._options.reduce_gradients, self._options.observer
        step.keep_outputs = keep_outputs
        if call.microbatches is not None:
            step.microbatches = call.microbatches
            step.loss = self._step_loss(len(call.microbatches), loss_kwargs)
            audited = self._options.audit is not None
            step.guard = self._guard = Guard(call.microbatches, audited, self._guard)
        return step

    def _messages(self, context: StepContext) -> Messages:
        """On demand in a call in which kernels may load."""
        if not self._first_use.has_new_shapes(context.plan.training, context.by_edge):
            return Messages(self._mesh.endpoints)
        key = f"{self._mesh.watchdog.key}/pipeline-{self._number}/call-{self._serial}"
        return OnDemand(self._mesh, key, self._mesh.stage in context.lockstep)

    def _step_loss(self, num_microbatches: int, loss_kwargs: Mapping[str, Any]) -> StepLoss | None:
        loss = self._options.loss
        if loss.function is None:
            return None
        replicas = self._mesh.topology.edge_dp if self._options.reduce_gradients else 1
        optional: dict[str, Any] = {"replicas": replicas, "loss_kwargs": loss_kwargs, "scale": loss.scale}
        if self._changes_gradients:
            optional["trained"] = set(map(id, self.parameters()))
        return StepLoss(loss.function, loss.reduction, num_microbatches, **optional)

    @property
    def _changes_gradients(self) -> bool:
        """Whether a step divides or reduces gradients after its backwards."""
        reduces = self._options.reduce_gradients and self._mesh.topology.dp > 1
        return self._options.loss.per_token or reduces

    def _execute(self, executor: Executor, step: StepState, call: Call) -> None:
        training = step.plan.training
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            scale: TokenScale | None = None
            earlier = EarlierGradients(self.parameters() if training and self._changes_gradients else ())
            if training and self._options.loss.counts:
                divided = self.parameters() if self._options.loss.per_token else ()
                scale = TokenScale(self._mesh.edge_broadcast, call, divided, self._options.audit)
                if self._mesh.is_edge and self._mesh.is_leader:
                    step.token_scale = scale
            try:
                self._buffers.run()
                executor.run()
                if scale is not None:
                    reduced = self._options.reduce_gradients
                    step.count = scale.finish(self._mesh.topology.edge_dp if reduced else 1)
            finally:
                earlier.add_back()

    def _result(self, step: StepState, stats: StepStats) -> StepResult:
        result = StepResult(stats, count=step.count)
        if step.loss is not None and step.loss.per_microbatch():
            result.loss = step.loss.total()
            result.losses = step.loss.per_microbatch()
            result.metrics = step.loss.metrics()
        if step.auxiliary:
            of_loss = None if step.loss is None else step.loss.weights()
            result.auxiliary = combined(step.auxiliary, of_loss, len(step.microbatches))
        if step.keep_outputs and self._mesh.is_edge:
            result.outputs = [step.outputs[index] for index in sorted(step.outputs)]
        return result
