"""Builds each rank's part of a model by the edge's settings, so that a rank of the cloud needs no script of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ldt.errors import LdtError
from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.loss import token_loss
from ldt.integrations.hf.make_chunks import make_chunks, make_optimizer
from ldt.integrations.hf.same_model import differ, digest_of_config, digest_of_weights
from ldt.integrations.hf.seeded_init import seed_by_name
from ldt.integrations.hf.settings import Settings
from ldt.plan import Plan, ushape
from ldt.runtime.common.peer_messages import as_str_list
from ldt.runtime.common.redact import InputTypeError
from ldt.runtime.execution.loss import LossFn
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.follower import follow as follow_pipeline
from ldt.train.grad_scaler import GradScaler

__all__ = ["Built", "build", "follow"]

logger = logging.getLogger(__name__)
ModelPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Built:
    """A rank's part of a model, ready to train. ``settings`` are the edge's."""

    pipeline: Pipeline
    chunks: list[Chunk]
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    settings: Settings


def build(
    mesh: Mesh,
    model: ModelPath,
    settings: Settings | None = None,
    *,
    loss_fn: LossFn = token_loss,
    optimizer: str | None = None,
    **options: Any,
) -> Built:
    """Build this rank's chunks, pipeline and optimizer by the edge's ``settings``. A collective call.

    Args:
        mesh: The mesh.
        model: Folder or hub name of the model, or its ``config.json``, at this rank's site. A rank reads only the
            weights of its own layers.
        settings: On the edge; ranks of the cloud get them.
        loss_fn: On the edge, as for ``ldt.Pipeline``.
        optimizer: Name of the optimizer of this rank, if it is not to be the edge's: see ``hf.Optimizer``.
        options: More arguments of this rank's ``ldt.Pipeline``.

    Raises:
        LdtError: A rank has another model: its config differs from the edge's, or its weights do, of which only some
            rows are compared, and only between folders.
        ValueError: The settings do not fit the model or the mesh.
        RemoteStageError: Another rank cannot build its part.
    """
    agreed, config = _agree(mesh, model, settings)
    error: Exception | None = None
    chunks, steps, digest = [], None, None
    try:
        chunks = make_chunks(config, model, agreed, mesh)
        steps = make_optimizer(chunks, agreed.optimizer, optimizer)
        digest = digest_of_weights(model) if agreed.weights == "checkpoint" else None
    except Exception as caught:
        error = caught
    _check_weights(mesh, all_agree(mesh, "hf.build()", error, {}, digest, _as_digest, phase="finish"))
    assert steps is not None, "all_agree raises the error"
    scaler = GradScaler(mesh) if agreed.scaler else None
    pipeline = Pipeline(
        chunks,
        mesh,
        _plan(mesh, agreed),
        loss_fn if mesh.is_edge else None,
        loss_reduction=agreed.loss_reduction,
        grad_scaler=scaler if mesh.is_edge else None,
        **options,
    )
    return Built(pipeline, chunks, steps, scaler, agreed)


def follow(
    mesh: Mesh, model: ModelPath, *, optimizer: str | None = None, checkpoints: ModelPath | None = None
) -> None:
    """Build this rank's part of a model as the edge says, and run what it asks for. Called on ranks of the cloud.

    The edge calls ``hf.build`` and makes an ``ldt.Leader``, or an ``hf.Trainer``. The seed of its settings, the stage
    and the replica seed the random numbers of this process, as for dropout.

    Args:
        mesh: The mesh.
        model: As for ``hf.build``, as is ``optimizer``.
        optimizer: Another optimizer than the edge's.
        checkpoints: Folder of checkpoints at this site.

    Raises:
        LdtError: As ``hf.build`` and ``ldt.follow`` do, as are ValueError and RemoteStageError.
    """
    built = build(mesh, model, optimizer=optimizer)
    number = sum(parameter.numel() for chunk in built.chunks for parameter in chunk.parameters())
    logger.info("rank %d has %d parameters of %s and follows the edge", mesh.global_rank, number, model)
    seed_by_name(built.settings.seed, f"stage {mesh.stage}, replica {mesh.replica}", mesh.device)
    follow_pipeline(
        built.pipeline, built.optimizer, scaler=built.scaler, learning_rate="edge", checkpoints=checkpoints
    )


def _agree(mesh: Mesh, model: ModelPath, settings: Settings | None) -> tuple[Settings, PreTrainedConfig]:
    """The edge's settings on every rank, and the model's config, which is the same everywhere."""
    error: Exception | None = None
    config: PreTrainedConfig | None = None
    sent, facts = None, {}
    try:
        config = AutoConfig.from_pretrained(model)
        sent = _complete(settings, config, model).to_json() if mesh.is_edge else None
        facts = {"configs of the model": digest_of_config(config)}
    except Exception as caught:
        error = caught
    gathered = all_agree(mesh, "hf.build()", error, facts, sent)
    of_edge = [gathered[rank] for rank in range(len(gathered)) if mesh.topology.node_of(rank).stage == 0]
    if any(found != of_edge[0] for found in of_edge):
        raise LdtError("all ranks of the edge must be given equal settings")
    try:
        agreed = Settings.from_json(of_edge[0])
    except ValueError as caught:
        raise LdtError(f"the edge sent other settings: {caught}; run one version of ldt everywhere") from None
    assert config is not None, "all_agree raises the error"
    return agreed, config


def _complete(settings: Settings | None, config: PreTrainedConfig, model: ModelPath) -> Settings:
    """The edge's settings, with the dtype of its config, and random weights where there is only a config."""
    if not isinstance(settings, Settings):
        raise InputTypeError(f"hf.build needs hf.Settings on the edge, got {type(settings).__name__}")
    dtype: Any = str(config.dtype or torch.float32).removeprefix("torch.")
    weights = "random" if Path(model).is_file() else settings.weights
    complete = replace(settings, dtype=settings.dtype or dtype, weights=weights)
    return Settings.from_json(complete.to_json())  # raises what other ranks would


def _as_digest(value: Any) -> str | None:
    return None if value is None else as_str_list([value])[0]


def _check_weights(mesh: Mesh, digests: list[str | None]) -> None:
    """Raise LdtError on every rank if two have a folder, with different weights."""
    known = {rank: digest for rank, digest in zip(mesh.ranks, digests, strict=True) if digest is not None}
    others = [rank for rank, digest in known.items() if differ(digest, next(iter(known.values())))]
    if others:
        raise LdtError(
            f"the folders of ranks {next(iter(known))} and {others} have different weights of the model: copy one "
            "folder to all sites"
        )


def _plan(mesh: Mesh, settings: Settings) -> Plan | None:
    if settings.plan is not None:
        return Plan.from_text(settings.plan)
    if settings.microbatches is None:
        return None
    return ushape(mesh.topology, settings.microbatches, lanes=mesh.lanes)
