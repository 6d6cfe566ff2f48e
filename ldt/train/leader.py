"""The edge drives: its calls tell cloud ranks that follow it what to run, so that these need no training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.runtime.control.command import Command, agreed_command
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.execution.step_result import StepResult, StepStats
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from ldt.train.checkpoint.catalog import Paths
from ldt.train.checkpoint.save import HasState
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
            trained on the edge, or if you step an optimizer yourself.
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
        self._closed = False
        error = None
        if not pipeline.mesh.is_edge:
            error = LdtError("ldt.Leader is for the edge: call ldt.follow on ranks of the cloud")
        all_agree(pipeline.mesh, "ldt.Leader or ldt.follow", error, self._updater.settings)

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
            upcoming: The microbatches of the next step, which then has the same ``update``, ``max_norm`` and
                ``norm_type``.
            keep_outputs: Return ``outputs``.
            loss_kwargs: Keyword arguments of the loss.

        Returns:
            That of ``Pipeline.step``; ``grad_norm`` is the norm before clipping, None without ``max_norm``.
        """
        if max_norm is not None and not update:
            raise ValueError("max_norm= clips before an update: it needs update=True")
        command = Command("step", update, max_norm, norm_type)
        result = self.pipeline.steps.run(
            "step",
            microbatches,
            upcoming,
            keep_outputs=keep_outputs,
            loss_kwargs=loss_kwargs,
            command=command.to_bytes(),
        )
        result.grad_norm = self._updater.run(command)
        return result

    def eval(
        self, microbatches: Any, *, keep_outputs: bool = True, loss_kwargs: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Run forward only on all ranks. See ``Pipeline.eval``."""
        return self.pipeline.steps.run(
            "eval",
            microbatches,
            keep_outputs=keep_outputs,
            loss_kwargs=loss_kwargs,
            command=Command("eval").to_bytes(),
        )

    def train(self, mode: bool = True) -> None:
        """Switch the modules of all ranks to train mode, or without ``mode`` to eval mode."""
        self._command(Command("train", mode=mode))
        self._updater.train(mode)

    def gather_stats(self, result: StepResult) -> list[StepStats] | None:
        """The statistics of all ranks in the last step or eval, whose ``result`` this is."""
        self._command(Command("stats"))
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
        self._command(Command("save", step=step, keep=keep))
        updater = self._updater
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
        self._command(Command("load", step=step))
        updater = self._updater
        return load_checkpoint(
            path, self.pipeline, updater.optimizer, step=step, extra=updater.extra, names=names
        )

    def close(self) -> None:
        """End ``follow`` on the cloud. Idempotent; after a failure it does nothing, as all ranks know of that."""
        if not self._closed and not self.pipeline.mesh.failed:
            self._command(Command("close"))
        self._closed = True

    def __enter__(self) -> Leader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _command(self, command: Command) -> None:
        """Send a command that no step carries. Called on all ranks of the edge."""
        mesh = self.pipeline.mesh
        mesh.check_usable()
        try:
            if mesh.is_leader:
                mesh.edge_broadcast.send(EdgeMessage(Subject.COMMAND, 0, command=command.to_bytes()))
            agreed_command(mesh.edge_broadcast.receive())
        except BaseException as error:
            mesh.fail(error, f"ldt.Leader, sending {command.name!r}")
