"""Loads a checkpoint: each rank reads the tensors of its chunks, whichever stages wrote them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ldt.errors import CheckpointError
from ldt.runtime.common.redact import InputTypeError, QuotingError
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline import Pipeline
from ldt.runtime.step.call import all_agree
from ldt.train.checkpoint import layout, optimizer_state, random_states
from ldt.train.checkpoint.catalog import Catalog, Paths, catalog, folders_of, paths_of
from ldt.train.checkpoint.checkpoint_reader import CheckpointReader
from ldt.train.checkpoint.choice import choose
from ldt.train.checkpoint.files import parse_json
from ldt.train.checkpoint.json_values import from_json
from ldt.train.checkpoint.layout import Save
from ldt.train.checkpoint.run_on_all_ranks import run_on_all_ranks
from ldt.train.checkpoint.save import HasState, check_savable
from ldt.train.checkpoint.tensor_names import Names, named_tensors
from ldt.train.checkpoint.tensor_parallel import as_shard

__all__ = ["LoadedCheckpoint", "load_checkpoint"]

logger = logging.getLogger(__name__)

_CALL = "load_checkpoint()"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The step after which the checkpoint was saved and, on the edge, the position in the data at that time."""

    step: int
    position: Any = None


def load_checkpoint(
    path: Paths,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, HasState] | None = None,
    names: Names | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest complete step that ``save_checkpoint`` saved, or ``step``. Returns None if there is none.

    A collective call of all ranks. The topology may differ from that of the save: other stages, laps, replicas, and
    tensor-parallel sizes if parameters are DTensors. ``path`` is one folder or a list of folders that together have
    the stages that this rank's chunks come from; each rank may give its own. Dtypes are converted. Gradients are
    dropped. Random states are restored if the topology is the same, otherwise left alone. Give ``optimizer`` and
    ``extra`` only if they were saved; an optimizer that had not stepped is as new afterwards.

    Anything that ``save_checkpoint`` could not save is refused here already, before training, even if there is nothing
    to load yet. Raises on all ranks if one cannot load. CheckpointError says what is missing or damaged, or has another
    shape; then nothing has been changed. If a file is unreadable or damaged, the text names the file and the other
    complete steps. No older save is loaded instead: pass ``step`` or move the damaged save away. If a file cannot be
    read to its end, some weights have already been changed, as the error says.
    """
    mesh = pipeline.mesh
    mesh.check_usable()
    error: Exception | None = None
    seen: Catalog = []
    paths: list[Path] = []
    try:
        if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
            raise InputTypeError(f"step must be a whole number or None, got {type(step).__name__}")
        check_savable(pipeline, optimizer, extra or {}, names)
        paths = paths_of(path)
        with layout.file_errors("the folder of the checkpoint cannot be read"):
            seen = catalog(paths, mesh.shareable_text)
    except Exception as caught:
        error = caught
    chosen = choose(all_agree(mesh, _CALL, error, {"steps": str(step)}, seen), step)
    if chosen is None:
        return None
    loading = _Loading(pipeline, optimizer, extra or {}, names, paths, chosen.save)
    for work in (loading.prepare, loading.finish):
        run_on_all_ranks(mesh, _CALL, chosen.naming_alternatives()(work))
    return LoadedCheckpoint(chosen.save.step, loading.position)


class _Loading:
    """One load on one rank: ``prepare`` finds and checks everything, ``finish`` reads it."""

    def __init__(
        self,
        pipeline: Pipeline,
        given: torch.optim.Optimizer | None,
        extra: Mapping[str, HasState],
        names: Names | None,
        paths: list[Path],
        save: Save,
    ) -> None:
        self.position: Any = None
        self._pipeline = pipeline
        self._mesh: Mesh = pipeline.mesh
        self._optimizer = given
        self._extra = extra
        self._names = names
        self._paths = paths
        self._save = save
        self._checkpoint = CheckpointReader({})
        self._new_optimizer_state: dict[str, Any] = {}
        self._extra_states: dict[str, Any] = {}
        self._restore_random_states: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Find and check everything without changing the job's state.

        Raises CheckpointError for tensors that are missing, damaged or of another shape.
        """
        with layout.file_errors("the folder of the checkpoint cannot be read"):
            folders = folders_of(self._paths, self._save)
        checkpoint = self._checkpoint = CheckpointReader(folders, self._mesh.stage)
        named = named_tensors(self._pipeline, self._names)
        checkpoint.want_model(
            {
                tuple(named.names_of(name)): as_shard(tensor, tensor, self._mesh, name)
                for name, tensor in named.tensors.items()
            }
        )
        checkpoint.check_files()  # before allocating memory for the tensors they declare
        if self._optimizer is not None:
            wanted, self._new_optimizer_state = optimizer_state.restored(
                self._optimizer,
                {id(tensor): checkpoint.stored_name(name) for name, tensor in named.tensors.items()},
                checkpoint.optimizer_of,
                checkpoint.shape,
                lambda tensor, parameter, name: as_shard(tensor, parameter, self._mesh, name),
            )
            for parameter, state, tensor in wanted:
                checkpoint.want_optimizer(parameter, state, tensor)
        self._extra_states = {name: from_json(checkpoint.extra(name)) for name in self._extra}
        edge_reader = checkpoint.stage_reader(0) if self._mesh.is_edge else None
        self.position = None if edge_reader is None else from_json(edge_reader.record.position)
        self._find_random_states()

    def finish(self) -> None:
        """Read everything."""
        try:
            self._checkpoint.read()
        except layout.StorageError as error:
            rank = self._mesh.ranks[self._mesh.rank]
            rest = f"Some weights of rank {rank} may already be changed: load again before you use them"
            raise error.reworded(lambda text: f"{text}. {rest}") from error
        if self._optimizer is not None:
            load = partial(optimizer_state.load, self._optimizer)
            _load_state(load, self._new_optimizer_state, "the optimizer")
        for name, thing in self._extra.items():
            _load_state(thing.load_state_dict, self._extra_states[name], name)
        self._restore_random_states()
        for parameter in self._pipeline.parameters():
            parameter.grad = None  # it may be that of a failed step

    def _find_random_states(self) -> None:
        reader = self._checkpoint.stage_reader(self._mesh.stage)
        if reader is None or reader.record.topology != self._mesh.topology:
            logger.info("random states are not restored: the checkpoint is of another topology")
            return
        part = layout.rank_folder(self._mesh.replica, self._mesh.tp_rank)
        file = reader.folder / part / layout.RANDOM_STATES
        states = parse_json(file, reader.part(part).content(layout.RANDOM_STATES), dict[str, Any])
        self._restore_random_states = random_states.restorer(states, self._mesh.device, file)


class UnusableStateError(CheckpointError, QuotingError):
    """A scheduler or an optimizer raised an error when its state was loaded."""


def _load_state(load: Callable[[dict[str, Any]], object], state: dict[str, Any], what: str) -> None:
    try:
        load(state)
    except CheckpointError:
        raise
    except Exception as error:
        text = f"{what} cannot load its state from the checkpoint: {type(error).__name__}"
        raise UnusableStateError(f"{text}: {error}", text) from error
