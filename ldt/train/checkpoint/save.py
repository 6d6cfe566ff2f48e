"""Saves a checkpoint: every stage writes its own and publishes it once all stages have written theirs."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ldt.errors import LdtError
from ldt.runtime.common.redact import InputTypeError, InputValueError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.checkpoint import layout, optimizer_state, random_states
from ldt.train.checkpoint.catalog import catalog, complete_saves, folder_of, kept_saves, next_save
from ldt.train.checkpoint.checksums import Checksums
from ldt.train.checkpoint.json_values import to_json
from ldt.train.checkpoint.layout import Save
from ldt.train.checkpoint.rank_metadata import pieces_in
from ldt.train.checkpoint.run_on_all_ranks import run_on_all_ranks
from ldt.train.checkpoint.stage_manifest import OptimizerRecord, StageManifest
from ldt.train.checkpoint.stage_parts import tensors_of_rank, write_tensors
from ldt.train.checkpoint.stage_reader import StageReader
from ldt.train.checkpoint.tensor_names import NamedTensors, Names, model_key, named_tensors
from ldt.train.checkpoint.tensor_parallel import as_shard

__all__ = ["HasState", "check_numbers", "check_savable", "save_checkpoint"]

logger = logging.getLogger(__name__)

_CALL = "save_checkpoint()"
_SAVE_ID = 16  # characters
_LIMIT = 10**18  # of numbers in folder names


class HasState(Protocol):
    """A scheduler or grad scaler. Its state must have no tensors of more than one element."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    position: Any = None,
    extra: Mapping[str, HasState] | None = None,
    keep: int = 2,
    names: Names | None = None,
) -> None:
    """Save the weights of all stages, their optimizers and random states as ``step`` in the folder ``path``.

    A collective call of all ranks. ``path`` may differ by stage, so that the edge's weights stay on a disk of the edge;
    the ranks of one stage share a folder. Each stage writes ``step-<step>/stage-<its number>``.
    ``optimizer`` is this rank's, None if everything is frozen. ``position``, the position in the data, is saved from
    the first rank of the edge, only in the edge's folder. ``extra`` are other objects with a state, by name, such as a
    scheduler. ``names(chunk index, name in the chunk)`` returns a tensor's name in the whole model, by which another
    split finds it; chunks of ``ldt.integrations.hf`` know theirs. Buffers, which may differ between replicas, are saved
    from the first replica, as ``sync_buffers`` does before the next call.

    A save is complete when all its stages are. A kill at any moment leaves the last complete save intact. After a save,
    those before the last ``keep`` are removed, and so are the remains of killed ones. A damaged save counts like any
    other. Raises on all ranks if one fails, for example CheckpointError for a full disk; the previous save then still
    exists, nothing is left of this one, and the mesh stays usable.
    """
    mesh = pipeline.mesh
    mesh.check_usable()
    draft: _PendingSave | None = None
    error: Exception | None = None
    own: list[Any] = []
    try:
        check_numbers(step, keep)
        draft = _PendingSave(folder_of(path), pipeline, optimizer, step, position, extra or {}, names)
        with layout.file_errors("the folder of the checkpoint cannot be read"):
            own = [secrets.token_hex(_SAVE_ID // 2), catalog([draft.path], mesh.shareable_text), draft.names]
    except Exception as caught:
        error = caught
    same = {"steps": str(step), "values of keep": str(keep)}
    answers = all_agree(mesh, _CALL, error, same, own)
    assert draft is not None
    _check_names(mesh, [names for *_, names in answers])
    catalogs = [seen for _, seen, _ in answers]
    save = next_save(catalogs, step)
    _write(mesh, draft, save, answers[0][0])
    if draft.is_first:
        _clear(draft.path, save, kept_saves(catalogs, save, keep))
    later = [other.step for other in complete_saves(catalogs) if other > save]
    if later:
        logger.warning(
            "%s has step %d, too, which load_checkpoint prefers to step %d", path, max(later), step
        )


def _write(mesh: Mesh, draft: _PendingSave, save: Save, save_id: str) -> None:
    try:
        run_on_all_ranks(mesh, _CALL, functools.partial(draft.write, save, save_id))
        run_on_all_ranks(mesh, _CALL, functools.partial(draft.publish, save))
    except BaseException:
        # After a failure of the mesh a stage may still publish its folder, which must then be whole. The next save
        # removes the remains.
        if not mesh.failed:
            layout.discard(draft.path, save, mesh.stage, published=draft.is_first)
        raise


def _clear(path: Path, save: Save, kept: list[Save]) -> None:
    try:
        layout.clear(path, save, kept)
    except OSError as error:
        logger.warning("could not remove older checkpoints in %s: %s", path, error)


def check_numbers(step: int, keep: int = 1) -> None:
    """Raise TypeError or ValueError if these cannot be the number of a step and of saves to keep."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputTypeError(f"{name} must be a whole number, got {type(value).__name__}")
        if not least <= value < _LIMIT:
            raise InputValueError(f"{name} must be at least {least} and less than {_LIMIT:.0e}, got {value}")


def _check_names(mesh: Mesh, digests: list[str]) -> None:
    """Raise LdtError on all ranks if names differ: a plain tensor missing on a stage's first rank would be lost."""
    for stage in range(mesh.topology.num_stages):
        first, *others = mesh.topology.ranks_of_stage(stage)
        other = next((rank for rank in others if digests[rank] != digests[first]), None)
        if other is not None:
            raise LdtError(
                f"ranks {mesh.ranks[first]} and {mesh.ranks[other]} of stage {stage} have tensors of different names: "
                "a checkpoint expects the same on all ranks of a stage, whole or as shards of a DTensor"
            )


def check_savable(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, HasState],
    names: Names | None,
) -> None:
    """Raise, as ``save_checkpoint`` would, for tensors, an optimizer or extra objects that cannot be saved.

    Checks only this rank. State that an optimizer creates in its first step is not known yet.
    """
    named = named_tensors(pipeline, names)
    if optimizer is not None:
        _capture_optimizer(optimizer, named, pipeline.mesh)
    for name, thing in extra.items():
        to_json(thing.state_dict(), name)


def _capture_optimizer(
    optimizer: torch.optim.Optimizer, named: NamedTensors, mesh: Mesh
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    return optimizer_state.capture(
        optimizer,
        named.by_identity(),
        lambda tensor, parameter, name: as_shard(tensor, parameter, mesh, name),
    )


class _PendingSave:
    """The data that this rank will write, captured when the call began. Only its stage's first rank publishes."""

    def __init__(
        self,
        path: Path,
        pipeline: Pipeline,
        given: torch.optim.Optimizer | None,
        step: int,
        position: Any,
        extra: Mapping[str, HasState],
        names: Names | None,
    ) -> None:
        self.path = path
        self.mesh = pipeline.mesh
        self.is_first = self.mesh.is_leader and self.mesh.replica == 0
        self._random_states = random_states.capture(self.mesh.device)
        named = named_tensors(pipeline, names)
        self.names = hashlib.sha256(json.dumps(sorted(named.tensors)).encode()).hexdigest()
        stored = {
            model_key(name): as_shard(tensor.detach(), tensor, self.mesh, name)
            for name, tensor in named.tensors.items()
        }
        optimizer_record: OptimizerRecord | None = None
        if given is not None:
            tensors, optimizer_record = _capture_optimizer(given, named, self.mesh)
            stored |= tensors
        self._tensors = tensors_of_rank(self.mesh.rank_info, stored)
        extra_states = {name: to_json(thing.state_dict(), name) for name, thing in extra.items()}
        data_position = to_json(position, "position") if self.mesh.is_edge else None
        self._record = StageManifest(
            self.mesh.topology,
            self.mesh.stage,
            step,
            save_id="0" * _SAVE_ID,
            aliases=named.aliases,
            optimizer=optimizer_record,
            extra=extra_states,
            position=data_position,
        )
        self._record.to_bytes()  # raise errors now, before any rank writes

    def write(self, save: Save, save_id: str) -> None:
        """Write this rank's part of its stage, without waiting for another rank."""
        mesh, folder = self.mesh, layout.unfinished_folder(self.path, save, self.mesh.stage)
        part = folder / layout.rank_folder(mesh.replica, mesh.tp_rank)
        with layout.file_errors(
            f"rank {mesh.global_rank} cannot write stage {mesh.stage} of the checkpoint of step {save.step}"
        ):
            part.mkdir(parents=True)
            if self.is_first:
                replace(self._record, save_id=save_id).write(folder)
            layout.write_synced(part / layout.RANDOM_STATES, json.dumps(self._random_states).encode())
            write_tensors(part, self._tensors)
            Checksums.write(part, save_id, pieces_in(part))
            layout.sync(part)

    def publish(self, save: Save) -> None:
        """Publish the stage on its first rank, once all stages have written."""
        if not self.is_first:
            return
        try:
            StageReader(layout.unfinished_folder(self.path, save, self.mesh.stage)).check_files()
        except layout.StorageError as error:
            advice = (
                f"all ranks of stage {self.mesh.stage} must be given the same folder, and all must see it"
            )
            raise error.reworded(lambda text: f"{text}: {advice}") from error
        with layout.file_errors(
            f"stage {self.mesh.stage} of the checkpoint of step {save.step} cannot be finished"
        ):
            layout.publish(self.path, save, self.mesh.stage)
