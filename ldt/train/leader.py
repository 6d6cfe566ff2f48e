"""The edge drives: its calls tell cloud ranks that follow it what to run, so that these need no training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.common.device import autocast_dtype
from ldt.runtime.common.managed import managed
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.command import MAX_RATES, Command, agreed_command
from ldt.runtime.execution.step_result import StepResult, StepStats
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from ldt.train.checkpoint.catalog import Paths
from ldt.train.checkpoint.save import HasState, check_numbers
from ldt.train.checkpoint.tensor_names import Names
from ldt.train.update import Updater

__all__ = ["Leader"]


class Leader:
    """Runs a pipeline on the edge for ranks of the cloud that call ``ldt.follow``.

    The constructor is a collective call: of ``ldt.Leader`` on the edge and ``ldt.follow`` on the cloud. A context
    manager: at the end of the block the cloud's ``follow`` returns. Meanwhile, make collective calls through it only.

    Args:
        pipeline: This rank's pipeline.
        optimizer: The optimizer of this rank's parameters, which ``step(update=True)`` steps. None if nothing is
            trained on the edge, or if you step an optimizer yourself. Its learning rates are those of ranks that
            follow with ``learning_rate="edge"``.
        scheduler: Stepped after the optimizer.
        scaler: The ``ldt.GradScaler`` of the pipeline, if it has one.

    Raises:
        LdtError: The cloud's ranks do not follow, or have a grad scaler where the edge has none or vice versa.
        RemoteStageError: The arguments of another rank are wrong.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: HasState | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._updater = Updater(pipeline, optimizer, scheduler, scaler)
        self._closed = self._announced = self._has_run = False
        error = self._updater.error()
        if not pipeline.mesh.is_edge:
            error = LdtError("ldt.Leader is for the edge: call ldt.follow on ranks of the cloud")
        takes_lr = all_agree(
            pipeline.mesh, "ldt.Leader or ldt.follow", error, self._updater.settings, False, bool
        )
        self._sends_lr = any(takes_lr)
        node_of = pipeline.mesh.topology.node_of
        self._own_rates = [rank for rank, takes in enumerate(takes_lr) if node_of(rank).stage and not takes]
        pipeline.mesh.detector.followed = True

    def require_learning_rate(self) -> None:
        """Raise LdtError if a rank of the cloud does not follow with ``learning_rate="edge"``. Ends the mesh then."""
        if self._own_rates:
            error = LdtError(
                f"ranks {self._own_rates} must follow with learning_rate='edge': a schedule of the edge alone would "
                "train other ranks at another rate"
            )
            self.pipeline.mesh.fail(error, "ldt.Leader")

    def step(
        self,
        microbatches: Any,
        *,
        update: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        upcoming: Any = None,
        keep_outputs: bool = False,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """Run a step on all ranks, and with ``update`` what follows it. Raises what ``Pipeline.step`` raises.

        Args:
            microbatches: As for ``Pipeline.step``, as are ``keep_outputs`` and ``loss_kwargs``.
            update: Step optimizers and schedulers and drop gradients on all ranks. Without, gradients accumulate.
            max_norm: Clip the norm of all gradients to this before the update. See ``ldt.clip_grad_norm_``.
            norm_type: The type of that norm.
            upcoming: The microbatches of the next step, which then has the same ``update``, ``max_norm``,
                ``norm_type`` and, if the cloud takes them, learning rates.
            keep_outputs: Return ``outputs``.
            loss_kwargs: Keyword arguments of the loss.

        Returns:
            That of ``Pipeline.step``; ``grad_norm`` is the norm before clipping, None without ``max_norm``.
        """
        if max_norm is not None and not update:
            raise InputValueError("max_norm= clips before an update: it needs update=True")
        limit, kind = None if max_norm is None else float(max_norm), float(norm_type)
        if not kind > 0 or (limit is not None and not limit >= 0):
            raise InputValueError(f"max_norm and norm_type must be positive, got {max_norm} and {norm_type}")
        rates = self._rates() if update else ()
        command = Command("step", bool(update), limit, kind, rates, autocast=self._autocast())
        with self._leading():
            self._announced = upcoming is not None
            result = self.pipeline.steps.run(
                "step",
                microbatches,
                upcoming,
                keep_outputs=keep_outputs,
                loss_kwargs=loss_kwargs,
                command=command.to_bytes(),
            )
            result.grad_norm = self._updater.run(command)
            self._has_run = True
        return result

    def eval(
        self, microbatches: Any, *, keep_outputs: bool = True, loss_kwargs: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Run forward only on all ranks. See ``Pipeline.eval``."""
        with self._leading():
            result = self.pipeline.steps.run(
                "eval",
                microbatches,
                keep_outputs=keep_outputs,
                loss_kwargs=loss_kwargs,
                command=Command("eval", autocast=self._autocast()).to_bytes(),
            )
            self._has_run = True
        return result

    def zero_grad(self) -> None:
        """Drop the gradients that steps without ``update`` have accumulated, on all ranks."""
        with self._command(Command("zero_grad")):
            self._updater.zero_grad()

    def train(self, mode: bool = True) -> None:
        """Switch the modules of all ranks to train mode, or without ``mode`` to eval mode."""
        with self._command(Command("train", mode=bool(mode))):
            self._updater.train(bool(mode))

    def gather_stats(self, result: StepResult) -> list[StepStats] | None:
        """The statistics of all ranks in the last step or eval, whose ``result`` this is.

        Raises ValueError if this leader has run none yet.
        """
        if not self._has_run:
            raise InputValueError(
                "gather_stats() is about the last step or eval of this ldt.Leader: run one first"
            )
        with self._command(Command("stats")):
            return self.pipeline.gather_stats(result)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        step: int,
        position: Any = None,
        keep: int = 2,
        names: Names | None = None,
    ) -> None:
        """Save a checkpoint of all ranks; the cloud's go to the folder given to ``follow``. See ``save_checkpoint``."""
        check_numbers(step, keep)
        updater = self._updater
        with self._command(Command("save", step=step, keep=keep, lr=self._rates())):
            save_checkpoint(
                path,
                self.pipeline,
                updater.optimizer,
                step=step,
                position=position,
                extra=updater.extra,
                keep=keep,
                names=names,
            )

    def load(
        self, path: Paths, *, step: int | None = None, names: Names | None = None
    ) -> LoadedCheckpoint | None:
        """Load a checkpoint on all ranks. See ``load_checkpoint``."""
        if step is not None:
            check_numbers(step)
        updater = self._updater
        with self._command(Command("load", step=step)):
            return load_checkpoint(
                path, self.pipeline, updater.optimizer, step=step, extra=updater.extra, names=names
            )

    def close(self) -> None:
        """End ``follow`` on the cloud. Idempotent; after a failure it does nothing, as all ranks know of that."""
        if not self._closed and not self.pipeline.mesh.failed:
            with self._command(Command("close")):
                self._closed = True

    def __enter__(self) -> Leader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _rates(self) -> tuple[float, ...]:
        """The learning rates, if the cloud takes them."""
        rates = self._updater.lr if self._sends_lr else ()
        if len(rates) > MAX_RATES:
            raise InputValueError(
                f"the cloud takes at most {MAX_RATES} different learning rates, got {len(rates)}: use fewer parameter "
                "groups"
            )
        return rates

    def _autocast(self) -> Any:
        dtype = autocast_dtype(self.pipeline.mesh.device)
        if dtype not in (None, "bfloat16", "float16"):
            raise InputValueError(
                f"ranks that follow autocast to bfloat16 or float16, got autocast to {dtype}"
            )
        return dtype

    @managed
    def _leading(self) -> Iterator[None]:
        """Wraps a call that the cloud's ranks make, too."""
        mesh = self.pipeline.mesh
        if self._closed:
            raise LdtError("this ldt.Leader is closed, so no rank follows it: make another one")
        mesh.detector.followed = False
        torch.clear_autocast_cache()  # has casts of weights from before an update, if all calls are under one autocast
        try:
            yield
        finally:
            mesh.detector.followed = not self._closed

    @managed
    def _command(self, command: Command) -> Iterator[None]:
        """Send a command that no step carries, and make its call within. Called on all ranks of the edge."""
        mesh = self.pipeline.mesh
        mesh.check_usable()
        with self._leading():
            try:
                if self._announced:
                    raise LdtError(
                        f"a step was announced (upcoming=), so {command.name!r} must wait: make that step first"
                    )
                if mesh.is_leader:
                    self.pipeline.steps.send_command(command.to_bytes())
                if agreed_command(mesh.edge_broadcast.receive()) != command:
                    raise LdtError(
                        "the ranks of the edge must make the same calls of ldt.Leader: this one differs"
                    )
            except BaseException as error:
                mesh.fail(error, f"ldt.Leader, sending {command.name!r}")
            yield
