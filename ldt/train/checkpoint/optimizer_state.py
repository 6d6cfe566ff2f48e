"""Captures an optimizer's state by parameter names and restores it into an optimizer of another topology.

``torch.distributed.checkpoint.state_dict`` does not fit for two reasons: it makes a step to get the state of an
optimizer that has not stepped, and it expects state for all parameters or none, but some parameters of a chunk may not
have had a gradient so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ldt._torch_private import optimizer_load_hooks
from ldt.errors import CheckpointError
from ldt.runtime.common.redact import InputValueError, QuotingError
from ldt.train.checkpoint.json_values import from_json, to_json
from ldt.train.checkpoint.stage_manifest import GroupRecord, OptimizerRecord

__all__ = ["capture", "load", "restored", "tensor_key"]

Wanted = tuple[str, str, torch.Tensor]  # parameter, key of its state, the tensor to read into
AsShard = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]  # tensor, parameter, name -> tensor
Stored = Callable[[str, str | None], tuple[torch.Size, torch.dtype]]


class UnknownStateError(CheckpointError, QuotingError):
    """An optimizer raised an error when asked for its state."""


_NOT_VALUES = {"params", "param_names"}


def tensor_key(parameter: str, state: str) -> str:
    """The key of a tensor in a parameter's state among a stage's tensors."""
    return f"optimizer.{parameter}.{state}"


def capture(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], as_shard: AsShard
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """Return its tensors by key, and the rest in JSON types. ``names`` are the parameters' names by ``id``.

    ``as_shard(tensor, parameter, name)`` returns the whole tensor that a tensor of a parameter's shape is a shard of.
    """
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, list[Any] | None]] = {}
    groups = [
        GroupRecord(
            [_name(parameter, names) for parameter in group["params"]],
            {
                key: to_json(value, f"{key} of the optimizer")
                for key, value in group.items()
                if key not in _NOT_VALUES
            },
        )
        for group in optimizer.param_groups
    ]
    for parameter, name, values in _states(optimizer, names):
        state[name] = {}
        for key, value in values.items():
            keep = _Keeping(tensors, parameter, name, key, as_shard)
            if isinstance(value, torch.Tensor):
                keep.as_key(value, key)
                state[name][key] = None
            else:
                state[name][key] = [to_json(value, f"{key} of {name} in the optimizer", keep)]
    return tensors, OptimizerRecord(groups, state)


class _Keeping:
    """Moves the tensors inside one value of a parameter's state to the stage's tensors, numbered in order."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        parameter: torch.Tensor,
        name: str,
        key: str,
        as_shard: AsShard,
    ) -> None:
        self._tensors, self._parameter, self._name, self._key = tensors, parameter, name, key
        self._as_shard = as_shard
        self._count = itertools.count()

    def __call__(self, value: torch.Tensor) -> str:
        return self.as_key(value, f"{self._key}#{next(self._count)}")

    def as_key(self, value: torch.Tensor, key: str) -> str:
        parameter, name = self._parameter, self._name
        _check_shape(value, self._as_shard(parameter, parameter, name), parameter, f"{key} of {name}")
        self._tensors[tensor_key(name, key)] = self._as_shard(value.detach(), parameter, name)
        return key


def restored(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    record_of: Callable[[str], OptimizerRecord | None],
    stored: Stored,
    as_shard: AsShard,
) -> tuple[list[Wanted], dict[str, Any]]:
    """Return empty tensors to read into, and a state dict with them for the optimizer to load.

    ``record_of(parameter)`` is the record of ``capture`` from where that parameter was saved. ``stored(parameter,
    state)`` is the shape and dtype of a tensor in its state, ``stored(parameter, None)`` its own. Raises
    CheckpointError if a trainable parameter was not in the optimizer, or if state belongs to a group that has changed.
    """
    wanted: list[Wanted] = []
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        found = []
        for parameter in group["params"]:
            name = _name(parameter, names)
            record = record_of(name)
            if record is None and parameter.requires_grad:
                raise CheckpointError(
                    f"the checkpoint has no optimizer state of {name}: it was not in the optimizer"
                )
            if record is not None:
                found.append((name, record))
                state[number] = _restored_state(parameter, name, record, stored, wanted, as_shard)
            number += 1
        _refuse_other_groups(found, stored)
        indices = list(range(number - len(group["params"]), number))
        groups.append({**group, **_as_in(group, _common_values(found)), "params": indices})
    return wanted, {
        "state": {index: values for index, values in state.items() if values},
        "param_groups": groups,
    }


def _states(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterable[tuple[torch.Tensor, str, Mapping[str, Any]]]:
    """The states by ``optimizer.state_dict()``, which may have hooks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        states = optimizer.state_dict()["state"]
    except Exception as error:  # for example from an optimizer with state on other ranks
        text = f"{type(optimizer).__name__} cannot return its state: {type(error).__name__}"
        raise UnknownStateError(f"{text}: {error}", text) from error
    for index, values in states.items():
        if not isinstance(index, int) or not isinstance(values, Mapping):
            raise CheckpointError(
                f"the optimizer keeps state under a {type(index).__name__} that belongs to no parameter: a checkpoint "
                "cannot save it"
            )
        yield parameters[index], _name(parameters[index], names), values


def _name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise InputValueError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that no chunk of this rank has: construct "
            "it with pipeline.parameters()"
        )
    return names[id(parameter)]


def _check_shape(value: torch.Tensor, whole: torch.Tensor, parameter: torch.Tensor, what: str) -> None:
    """Raise CheckpointError for a sharded state tensor that another topology could not reshard."""
    if isinstance(whole, DTensor) and value.shape != parameter.shape and value.dim() > 0:
        raise CheckpointError(
            f"{what} in the optimizer has shape {list(value.shape)}, its sharded parameter {list(parameter.shape)}: "
            "a checkpoint can only save state of a sharded parameter that has its shape or is a single number"
        )


def _restored_state(
    parameter: torch.Tensor,
    name: str,
    record: OptimizerRecord,
    stored: Stored,
    wanted: list[Wanted],
    as_shard: AsShard,
) -> dict[str, Any]:
    def made(key: str) -> torch.Tensor:
        shape, dtype = stored(name, key)
        if dtype == stored(name, None)[1] and math.prod(shape) > 1:
            dtype = parameter.dtype  # follow the parameter's dtype; other dtypes stay
        if shape == as_shard(parameter, parameter, name).shape and key != "step":
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:  # load_state_dict moves it to its device
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        wanted.append((name, key, as_shard(tensor, parameter, name)))
        return tensor

    restored: dict[str, Any] = {}
    for key, value in record.state.get(name, {}).items():
        restored[key] = made(key) if value is None else from_json(value[0], made)
    return restored


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load ``state`` into the optimizer and keep its dtypes and texts.

    torch casts all tensors to the dtype of their parameter, even the bytes of an 8-bit optimizer. An optimizer with its
    own ``load_state_dict``, or with hooks on it, does its own loading.
    """
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or any(
        optimizer_load_hooks(optimizer)
    ):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        optimizer.state[parameters[index]] = _as_saved(loaded, values)


def _as_saved(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    return saved


def _refuse_other_groups(found: Sequence[tuple[str, OptimizerRecord]], stored: Stored) -> None:
    """Raise CheckpointError if a group has changed that has group-wide state, larger than a parameter, as in LBFGS."""
    names = [name for name, _ in found]
    for name, record in found:
        group = next(group.params for group in record.groups if name in group.params)
        if group == names:
            continue
        size = math.prod(stored(name, None)[0])
        for key, value in record.state.get(name, {}).items():
            keys = [key] if value is None else _names_in(value)
            if any(math.prod(stored(name, one)[0]) > size for one in keys):
                raise CheckpointError(
                    f"{key} of {name} in the optimizer is larger than the parameter, so it may belong to the whole "
                    "group: load it with the same parameters in that group, that is, with the same split of the model"
                )


def _names_in(value: Any) -> list[str]:
    found: list[str] = []

    def collect(name: str) -> torch.Tensor:
        found.append(name)
        return torch.empty(0)

    from_json(value, collect)
    return found


def _common_values(found: Iterable[tuple[str, OptimizerRecord]]) -> dict[str, Any]:
    """The saved hyperparameters of these parameters; empty if there are none.

    Only some ranks may have one: schedulers add "initial_lr", and ranks that follow have none.
    """
    first = ""
    common: dict[str, Any] | None = None
    for name, record in found:
        values = next(group.values for group in record.groups if name in group.params)
        if common is None:
            first, common = name, values
        elif all(values[key] == common[key] for key in values.keys() & common.keys()):
            common = {**values, **common}
        else:
            text = (
                f"{first} and {name} are in one group of the optimizer, but were saved with different values"
            )
            advice = "use the same groups as before"
            raise QuotingError(f"{text}, {common} and {values}: {advice}", f"{text}: {advice}")
    return {key: from_json(value) for key, value in (common or {}).items()}


def _as_in(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Put values back into tensors where the optimizer keeps them so, as a learning rate may be."""
    return {
        key: torch.full_like(group[key], value) if isinstance(group.get(key), torch.Tensor) else value
        for key, value in values.items()
    }
