"""The pipeline: this rank's chunks on a mesh, with step() and eval()."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ldt.plan import Costs, Plan
from ldt.runtime.common.tensor_spec import HopSpecs
from ldt.runtime.execution.aliasing import Aliasing
from ldt.runtime.execution.edge_chunks import make_runner
from ldt.runtime.execution.loss import LossFn, LossOptions, LossReduction
from ldt.runtime.execution.nan_check import NanCheck
from ldt.runtime.execution.observer import Observer
from ldt.runtime.execution.profile_costs import measure_costs
from ldt.runtime.execution.profiler import Profile, Profiler
from ldt.runtime.execution.step_result import StepResult, StepStats
from ldt.runtime.execution.step_runner import StepOptions, StepRunner
from ldt.runtime.execution.stream_timer import StreamTimer
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline_setup import PipelineArguments, WeightOptions, check_ties, set_up
from ldt.runtime.step.announce import Announcer
from ldt.runtime.step.handshake import Handshake
from ldt.runtime.step.plan_cache import PlanFactory
from ldt.runtime.step.shape_cache import ShapeCache

__all__ = ["Pipeline"]


class Pipeline:
    """Runs a model that is split into chunks over the nodes of a mesh.

    The constructor is a collective call of all ranks of the mesh: if the arguments are wrong on one rank, every rank
    raises.

    Ranks that hold the same weights, which are those of a stage and its replicas, must begin with equal parameters and
    buffers. A trainable parameter must not be on two stages, and one that modules of a stage share must remain one
    tensor. Such ties are found by name in the whole model, or by equal values and what holds them (see
    ``ldt.runtime.model.tie_evidence``); tensors that are only alike are logged.

    Args:
        chunks: This rank's modules in model order, on ``mesh.device``: those of ``topology.chunks_of(mesh.stage)``.
        mesh: The mesh that ``ldt.connect`` returned.
        plan: The order of actions; any plan that ``ldt.plan.verify`` accepts. A step with another number of
            microbatches is refused unless there is a ``plan_factory``. Default: ``ldt.plan.ushape``.
        loss_fn: ``loss_fn(output, target)``, needed and used only on the edge. Its parameters, if it is a module or
            refers to some, are trained as those of the last chunk. It may return a dict of metrics behind the loss,
            as ``(loss, {"accuracy": accuracy})``: tensors or numbers, found in ``StepResult.metrics``.
        loss_reduction: ``"mean"`` if ``loss_fn`` returns the mean of a microbatch, ``"sum"`` if gradients are those of
            the sum over microbatches, ``"token"`` if it returns the sum and the number of tokens, ``"root"`` if it
            returns the tensor that the backward starts from, already scaled, and a count. Equal on all ranks.
        free_outputs: Free the output of a chunk once it is sent; its graph is kept.
        plan_factory: ``plan_factory(topology, num_microbatches, training)`` makes the plans that are not given. Each
            rank calls it for itself; a step fails if the plans differ. Default: ``ldt.plan.ushape`` makes those for
            eval, and all of them if there is no ``plan``.
        grad_scaler: An ``ldt.GradScaler``, needed on the edge: scales what backwards start from.
        scale_root: On the edge, in place of a ``grad_scaler``: ``scale_root(loss)`` returns what a backward starts
            from. Losses are reported without it.
        reduce_gradients: ``False`` leaves gradients of replicas to a wrapper that reduces them itself; the step then
            has those of this replica's microbatches. Equal on all ranks.
        observer: An ``ldt.Observer``, called before and after each forward and backward on this rank.
        audit: File that the edge writes; ranks of the cloud ignore it. Has a line for everything that leaves the
            edge. The edge then also looks for copies of samples and labels; their own memory is never sent.
        check_finite: Raise NonFiniteError at the first NaN or infinity in what an action computes, before it is sent:
            outputs of chunks, the loss, the gradients of inputs and parameters. -inf passes in outputs, where masks
            have it. Other ranks raise RemoteStageError with the same text. With a ``grad_scaler`` gradients are not
            checked, as they may overflow. Costs a pass over these tensors, and on a device a wait of the host in each
            compute action, two in the last chunk's forward.
        check_weights: Compare weights and search for ties. ``False`` is for weights that are loaded later; what
            ``sync_weights`` sends is compared even then.
        sync_weights: Send the parameters and buffers of the first rank that holds them to the others, instead of
            requiring equal values.
        allow_equal_weights: Search for ties by name only, not by values.
        sync_buffers: Before each call, send the buffers of the first replica to the others: those in a
            ``state_dict``, such as running statistics. Chunks in DistributedDataParallel follow its
            ``broadcast_buffers`` instead, for all buffers.
        profile: An ``ldt.Profile`` on the edge: steps to record on all ranks, as one trace for Perfetto. That of a rank
            of the cloud says where its kernels are written.

    Raises:
        ValueError: An argument of this rank is wrong, such as the number of chunks.
        TypeError: An argument of this rank has the wrong type.
        PlanError: ``plan`` does not fit the mesh.
        LdtError: Weights differ that must be equal, a weight is tied across stages, or ranks were given different
            plans or options. Raised on every rank; names the tensors and where they are.
        RemoteStageError: The arguments of another rank are wrong.
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
        scale_root: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reduce_gradients: bool = True,
        observer: Observer | None = None,
        audit: str | Path | None = None,
        check_finite: bool = False,
        check_weights: bool = True,
        sync_weights: bool = False,
        allow_equal_weights: bool = False,
        sync_buffers: bool = True,
        profile: Profile | None = None,
    ) -> None:
        self._mesh = mesh
        self._weights = WeightOptions(check_weights, sync_weights, allow_equal_weights, sync_buffers)
        loss = LossOptions(loss_fn, loss_reduction, grad_scaler, scale_root)
        arguments = PipelineArguments(
            chunks, plan, plan_factory, loss, audit, self._weights, profile, reduce_gradients, observer
        )
        parts, summary = set_up(mesh, arguments)
        self._plans, self._loss_module = parts.plans, parts.loss_module
        number = mesh.next_pipeline_number()
        aliasing = Aliasing(mesh.watchdog.store, f"{mesh.watchdog.key}/pipeline-{number}")
        self._runners = {
            index: make_runner(mesh, index, module, free_outputs, parts.loss_module, aliasing)
            for index, module in parts.modules.items()
        }
        self._shapes = ShapeCache(
            mesh, parts.modules, summary.reads, number, parts.loss_module is not None, parts.audit
        )
        announcer: Announcer | None = None
        if mesh.is_edge:
            announcer = Announcer(mesh, self._shapes, parts.plans, summary.metadata, parts.audit)
        handshake = Handshake(mesh, self._shapes, parts.plans, announcer)
        nan_check = NanCheck(activations=check_finite, gradients=check_finite and not summary.scaled)
        profiler = None if summary.profile is None else Profiler(mesh, summary.profile, profile)
        options = StepOptions(
            loss, parts.loss_module, nan_check, parts.audit, profiler, reduce_gradients, observer
        )
        self._steps = StepRunner(mesh, number, self._runners, handshake, parts.buffers, options)

    @property
    def mesh(self) -> Mesh:
        """The mesh that this pipeline runs on."""
        return self._mesh

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """This rank's modules, in model order."""
        return tuple(runner.module for runner in self._runners.values())

    @property
    def steps(self) -> StepRunner:
        """Runs the calls of this pipeline. Used by ``ldt.Leader``."""
        return self._steps

    @property
    def loss_module(self) -> nn.Module | None:
        """The module with the parameters and buffers of ``loss_fn``, on the edge; None if it has none."""
        return self._loss_module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this rank's chunks, for an optimizer and ``clip_grad_norm_``.

        A shared parameter comes once. On the edge the parameters of ``loss_fn`` are included.
        """
        return iter(self._steps.parameters())

    def plan(self, num_microbatches: int, *, training: bool = True) -> Plan:
        """Return the plan that a step, or without ``training`` an eval, of ``num_microbatches`` runs."""
        return self._plans.get(num_microbatches, training)

    def forget_shapes(self) -> None:
        """Forget what hops carry. Call it on every rank after freezing or unfreezing layers.

        Raises:
            LdtError: A weight that is trained from now on is tied across stages, as in ``Pipeline()``. Raised on
                every rank.
        """
        self._shapes.forget()
        self._steps.forget_shapes()
        check_ties(self._mesh, self._shapes.chunks, self._weights)

    def step(
        self,
        microbatches: Any = None,
        *,
        upcoming: Any = None,
        keep_outputs: bool = False,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """Run forward and backward of all microbatches. A collective call of all ranks of the mesh.

        Adds the gradient of the mean over microbatches (or their sum, or the mean over tokens: see ``loss_reduction``)
        to ``.grad``, also under ``torch.no_grad``. Calls no optimizer.

        Args:
            microbatches: On the edge a list of (inputs, target) pairs; ``None`` on the cloud.
            upcoming: On the edge, if known, the microbatches of the next step, which are announced to all ranks while
                this step runs. The next call must be that step, with the same list.
            keep_outputs: Return what the last chunk computed, detached, as ``outputs`` on the edge. It then keeps the
                memory of all microbatches' outputs until you drop the result.
            loss_kwargs: Keyword arguments of ``loss_fn`` for all microbatches, on the edge.

        Returns:
            The statistics of this rank, and on the edge the losses and metrics.

        Raises:
            ValueError: The edge was given bad microbatches or has no ``loss_fn``, or the cloud was given some.
            TypeError: A microbatch has the wrong type.
            PlanError: The given plan is for another number of microbatches.
            LdtError: The call is under ``torch.inference_mode``.
            RemoteStageError: Another rank raised. If a leader of the edge raises one of the errors above, it does so
                before anything is sent, and the pipeline stays usable. After any other failure, such as one of these
                errors on the cloud alone, the text says which rank failed and where, the rank that failed raises its
                own error, and the mesh can no longer be used. ``connect(share_edge_errors=...)`` decides what other
                ranks learn of an error on the edge.
        """
        return self._steps.run(
            "step", microbatches, upcoming, keep_outputs=keep_outputs, loss_kwargs=loss_kwargs
        )

    def eval(
        self,
        microbatches: Any = None,
        *,
        keep_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """Run forward only, without gradients. A collective call of all ranks of the mesh.

        Modules are not switched to eval mode. Raises as ``step`` does.

        Args:
            microbatches: On the edge a list of (inputs, target) pairs; ``None`` on the cloud. A target may be None;
                the loss is that of the microbatches that have one.
            keep_outputs: Return ``outputs``. Without, an eval of many microbatches takes the memory of few.
            loss_kwargs: As for ``step``.

        Returns:
            The statistics of this rank, and on the edge ``outputs``, one per microbatch, the losses and metrics.
        """
        return self._steps.run("eval", microbatches, keep_outputs=keep_outputs, loss_kwargs=loss_kwargs)

    def validate(self, microbatches: Any = None, *, training: bool = True) -> list[list[HopSpecs]]:
        """Check all boundaries between stages. A collective call of all ranks of the mesh.

        Runs every chunk on fake tensors, without data and without compute.

        Args:
            microbatches: As for ``step``.
            training: Check the hops of a step; without it those of an eval.

        Returns:
            ``hops[m][c]``, what hop c -> c+1 carries for microbatch m: a ``TensorSpec`` for each tensor, none within
            a node.

        Raises:
            LdtError: A chunk on this rank does not accept its inputs, or returns other tensors than it declares. Names
                the chunk, the tensor and both shapes.
            RemoteStageError: The same on another rank, with its text.
            ValueError: As for ``step``, as are TypeError and PlanError.
        """
        context = self._steps.validate(self._shapes, microbatches, training)
        return [list(hops) for hops in context.hops]

    def gather_stats(self, result: StepResult) -> list[StepStats] | None:
        """Gather the statistics of ``result`` of all ranks on the edge. A collective call.

        Returns:
            One per rank of the topology on the edge; None on the cloud.
        """
        with self._mesh.collective("gather_stats()"):
            gathered: list[StepStats] = self._mesh.control.all_gather(
                result.stats.to_json(), StepStats.from_json
            )
        return gathered if self._mesh.is_edge else None

    def measure_costs(self, microbatches: Any = None, steps: int = 3) -> Costs:
        """Measure the costs of this pipeline's steps for ``ldt.plan.optimize``. A collective call.

        Runs ``steps`` + 1 steps, then measures the links over their own lanes: latency by round trips of one byte,
        bandwidth by trains of messages on all channels of two sites (or two nodes of a site) at once, both ways. A
        train lasts for about 60 round trips, 0.1 to 3 s. Between two sites single messages follow, of which the
        second slowest gives the jitter. Gradients stay as they are; buffers and random states advance as in training.

        Args:
            microbatches: As for ``step``.
            steps: Number of measured steps; one more runs first as a warm-up.

        Returns:
            Equal on every rank: compute in seconds per chunk, of the slowest rank that has it; one-way latency and
            jitter in seconds per hop; bandwidth in bytes per second, up and down, of the pipe that a hop shares with
            others; and bytes per hop, forward and backward. On a device with streams an action costs its time on the
            stream, which includes launches that the host makes late.
        """
        device = self._mesh.device

        def step(batch: Any) -> StepStats:
            timer = None if device.type == "cpu" else StreamTimer(device)
            return self._steps.run("step", batch, timer=timer, profiled=False).stats

        return measure_costs(self._mesh, step, microbatches, steps, self.parameters())
