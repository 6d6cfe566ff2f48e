"""The cloud follows: runs what the edge asks for, without data, training loop or schedule of its own."""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.control.command import Command, agreed_command
from ldt.runtime.control.edge_messages import Subject
from ldt.runtime.execution.step_result import StepResult
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.checkpoint import load_checkpoint, save_checkpoint
from ldt.train.checkpoint.save import HasState
from ldt.train.checkpoint.tensor_names import Names
from ldt.train.update import Updater

__all__ = ["follow"]

logger = logging.getLogger(__name__)


def follow(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    learning_rate: Literal["own", "edge"] = "own",
    checkpoints: str | os.PathLike[str] | None = None,
    names: Names | None = None,
) -> None:
    """Run what the edge's ``ldt.Leader`` asks for, until it closes. Called on every rank of the cloud.

    What the edge asks for comes with the message of each step, in a form that is checked. It can name no file: saves
    go to, and come from, the folder ``checkpoints``.

    Args:
        pipeline: This rank's pipeline.
        optimizer: The optimizer of this rank's parameters; None only if all are frozen.
        scheduler: Stepped after the optimizer. Each rank's must change the rate alike.
        scaler: This rank's ``ldt.GradScaler``, if the edge has one.
        learning_rate: ``"own"`` for that of this rank's optimizer and scheduler, ``"edge"`` for that of the edge's
            optimizer in each update: of each parameter group, or one for all. Then there is no ``scheduler`` here.
        checkpoints: Folder of checkpoints on this site.
        names: Names of tensors in the whole model; see ``save_checkpoint``.

    Raises:
        ValueError: There are parameters to train but no optimizer, or ``learning_rate`` is wrong.
        LdtError: The edge asks for something that this rank cannot do, such as a save without ``checkpoints``.
        RemoteStageError: Another rank failed.
    """
    mesh = pipeline.mesh
    updater, takes_lr = Updater(pipeline, optimizer, scheduler, scaler), learning_rate == "edge"
    follower = _Follower(pipeline, updater, takes_lr, checkpoints, names)
    error = follower.error()
    if learning_rate not in ("own", "edge") or (scheduler is not None and takes_lr):
        error = InputValueError(
            "learning_rate must be 'own', or 'edge' without a scheduler on this rank, got "
            f"{learning_rate!r} and {'no' if scheduler is None else 'a'} scheduler"
        )
    all_agree(mesh, "ldt.Leader or ldt.follow", error, updater.settings, takes_lr, bool)
    while (command := follower.next()).name != "close":
        try:
            follower.run(command)
        except LdtError as error:
            if mesh.failed:
                raise
            logger.warning("the edge's %s was not done: %s", command.name, error)  # all ranks know


class _Follower:
    def __init__(
        self,
        pipeline: Pipeline,
        updater: Updater,
        takes_lr: bool,
        checkpoints: str | os.PathLike[str] | None,
        names: Names | None,
    ) -> None:
        self._names = names
        self._takes_lr = takes_lr
        self.updater = updater
        self._pipeline = pipeline
        self._checkpoints = checkpoints
        self._result: StepResult | None = None

    def error(self) -> Exception | None:
        """Why this rank cannot follow."""
        if self._pipeline.mesh.is_edge:
            return LdtError("ldt.follow is for ranks of the cloud: use ldt.Leader on the edge")
        return self.updater.error()

    def next(self) -> Command:
        """The next command. A step's message stays where the step finds it."""
        mesh = self._pipeline.mesh
        mesh.check_usable()
        try:
            edge_messages = mesh.edge_broadcast.peek()
            command = agreed_command(edge_messages)
            if edge_messages[0].subject is Subject.COMMAND:
                mesh.edge_broadcast.receive()
        except BaseException as error:
            mesh.fail(error, "ldt.follow, between two commands")
        return command

    def run(self, command: Command) -> None:
        """Make the call. Raises what it raises, on all ranks."""
        torch.clear_autocast_cache()  # has casts of weights from before an update, if follow runs under autocast
        {
            "step": self._step,
            "eval": self._eval,
            "zero_grad": self._zero_grad,
            "train": self._train,
            "stats": self._gather_stats,
            "save": self._save,
            "load": self._load,
        }[command.name](command)

    def _step(self, command: Command) -> None:
        if command.update:
            self._take_lr(command)
        with self._autocast(command):
            self._result = self._pipeline.step()
        self.updater.run(command)

    def _take_lr(self, command: Command) -> None:
        if self._takes_lr and self.updater.optimizer is not None:
            try:
                self.updater.set_lr(command.lr)
            except LdtError as error:
                self._pipeline.mesh.fail(error, "ldt.follow")

    def _eval(self, command: Command) -> None:
        with self._autocast(command):
            self._result = self._pipeline.eval()

    def _autocast(self, command: Command) -> torch.autocast:
        dtype = None if command.autocast is None else getattr(torch, command.autocast)
        return torch.autocast(self._pipeline.mesh.device.type, dtype, enabled=dtype is not None)

    def _zero_grad(self, command: Command) -> None:
        self.updater.zero_grad()

    def _train(self, command: Command) -> None:
        self.updater.train(command.mode)

    def _gather_stats(self, command: Command) -> None:
        if self._result is None:
            error = LdtError("the edge asks for the statistics of a step before the first step")
            self._pipeline.mesh.fail(error, "ldt.follow")
        self._pipeline.gather_stats(self._result)

    def _save(self, command: Command) -> None:
        updater = self.updater
        self._take_lr(command)  # as the edge saves them: its scheduler has gone on since the step
        save_checkpoint(
            self._folder("save_checkpoint()"),
            self._pipeline,
            updater.optimizer,
            step=command.step,  # type: ignore[arg-type]  # checked there, on all ranks
            extra=updater.extra,
            keep=command.keep,
            names=self._names,
        )

    def _load(self, command: Command) -> None:
        updater, folder = self.updater, self._folder("load_checkpoint()")
        load_checkpoint(
            folder,
            self._pipeline,
            updater.optimizer,
            step=command.step,
            extra=updater.extra,
            names=self._names,
        )

    def _folder(self, call: str) -> str | os.PathLike[str]:
        """The folder of checkpoints. If there is none, raises LdtError on all ranks, which make ``call``."""
        if self._checkpoints is None:
            error = InputValueError("ldt.follow needs checkpoints= on this rank, a folder of this site")
            all_agree(self._pipeline.mesh, call, error, {})
        assert self._checkpoints is not None
        return self._checkpoints
