"""What a chunk returns, found without computing anything: it runs on fake tensors, or says so itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ldt.errors import LdtError
from ldt.runtime.data_parallel import is_fully_sharded
from ldt.runtime.disclosure import InputTypeError, InputValueError, QuotingError, disclose, reveal
from ldt.runtime.error_text import text_of
from ldt.runtime.keywords import keywords_of
from ldt.runtime.outputs import as_tensors
from ldt.runtime.shards import NodeShards
from ldt.runtime.specs import HopSpecs, TensorSpec, describe

__all__ = ["dry_run", "infer_specs", "needs_values", "warm_up"]

# What a right forward may raise for want of values: it reads them, or runs an operator that is not known for fakes.
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
_SIGNS = ("FakeTensor", "fake impl", "not supported for tensor subclasses")  # of plain RuntimeErrors
_SWAPPED_BY_NAME = ("_parameters", "_buffers")
_Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional, by keyword
_DECLARE = (
    "declare the result: give the module a method output_spec(*input_specs) that returns one ldt.runtime.TensorSpec "
    "per output"
)
_ADVICE = f". If its forward is right but depends on values, {_DECLARE}"


def needs_values(error: Exception) -> bool:
    """Whether a right forward may raise ``error`` on fake tensors, which have no values."""
    return isinstance(error, _NEEDS_VALUES) or any(sign in text_of(error) for sign in _SIGNS)


def infer_specs(
    chunk: int,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
    shards: NodeShards | None = None,
) -> HopSpecs:
    """The specs of what ``module`` returns for arguments that are tensors, or TensorSpecs of tensors on ``device``.

    Calls ``module.output_spec`` if there is one, with specs of all and of the keywords that it takes, but metadata as
    they are. Otherwise by a dry run. Raises LdtError naming the chunk if that does not work.
    """
    declared: Callable[..., Any] | None = getattr(module, "output_spec", None)
    try:
        if declared is not None:
            of_args, of_kwargs = _with_specs((args, kwargs))
            takes = keywords_of(declared)
            of_kwargs |= {name: kwargs[name] for name in takes.metadata if name in kwargs}
            outputs = declared(*of_args, **takes.pick(of_kwargs, len(of_args)))
            specs = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
            if not all(isinstance(spec, TensorSpec) for spec in specs):
                kinds = ", ".join(type(spec).__name__ for spec in specs)
                raise InputTypeError(f"output_spec must return TensorSpecs, got {kinds}")
            specs = tuple(map(_with_split_dim, specs))
        elif is_fully_sharded(module):
            raise LdtError(f"modules of fully_shard cannot be run on fake tensors: {_DECLARE}")
        else:
            shards = shards or NodeShards()
            output = dry_run(module, args, kwargs, device, training, shards)
            specs = shards.specs_of(as_tensors(output, chunk), f"output of chunk {chunk}")
    except Exception as error:
        leaves = pytree.tree_leaves(_with_specs((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
        what = f"cannot tell what chunk {chunk} ({type(module).__name__}) returns for {describe(tensors)}"
        advice = _ADVICE if declared is None and needs_values(error) else ""
        raise QuotingError(
            f"{what}: {reveal(error)[0].rstrip('. ')}{advice}",
            plain=f"{what}: {disclose(error).rstrip('. ')}{advice}",
        ) from error
    return specs if training else tuple(spec.without_grad() for spec in specs)


def _with_split_dim(spec: TensorSpec) -> TensorSpec:
    """The spec with its ``shard`` counted from the front. Raises ValueError if there is no such dimension."""
    dims = len(spec.shape)
    if spec.shard is None:
        return spec
    if not -dims <= spec.shard < dims or spec.order:
        raise InputValueError(
            f"the shard of a spec that output_spec returns must be one of its {dims} dimensions, its order as usual; "
            f"got {spec!r}"
        )
    return replace(spec, shard=spec.shard % dims)


def _with_specs(arguments: _Arguments) -> _Arguments:
    args, kwargs = arguments
    specs: _Arguments = pytree.tree_map_only(torch.Tensor, TensorSpec.of, (tuple(args), kwargs))
    return specs


def dry_run(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
    shards: NodeShards,
) -> Any:
    """What the module returns for fake tensors in place of tensors and TensorSpecs: no data, no random numbers.

    The attributes of the module and its parts are put back, with the entries of those that are lists, dicts or sets,
    but not what objects in them hold. Its hooks run, too.
    """

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return mode.from_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            return _fake_of(TensorSpec.of(leaf), leaf.device, shards)
        return _fake_of(leaf, device, shards) if isinstance(leaf, TensorSpec) else leaf

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _restored(module), torch.set_grad_enabled(training), mode:
        named = [*module.named_parameters(), *module.named_buffers()]
        state: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named}
        _fake_attributes(module, mode)
        fake_args, fake_kwargs = pytree.tree_map(fake, (tuple(args), kwargs))
        return torch.func.functional_call(module, state, fake_args, fake_kwargs)


def _fake_of(spec: TensorSpec, device: torch.device, shards: NodeShards) -> torch.Tensor:
    part = spec.from_wire(torch.empty(shards.local_shape(spec), dtype=spec.dtype, device=device))
    if spec.requires_grad and torch.is_grad_enabled():
        # Not a leaf: like a received tensor, it may be modified in place.
        part = part.requires_grad_().clone()
    return shards.whole(part, spec)


def _fake_attributes(module: nn.Module, mode: FakeTensorMode) -> None:
    """Swap tensors that are attributes, or entries of such lists and dicts: changes in place must not reach them."""

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if type(value) is torch.Tensor else value

    for part in module.modules():
        for name, value in part.__dict__.items():
            if isinstance(value, list):
                value[:] = map(fake, value)
            elif isinstance(value, dict) and name not in _SWAPPED_BY_NAME:
                for key, entry in value.items():
                    value[key] = fake(entry)
            else:
                part.__dict__[name] = fake(value)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves behind: attributes of all submodules, and the states of random generators.

    Of attributes that are lists, dicts (such as the registries of parameters, buffers and modules) or sets also the
    entries.
    """
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    containers = [
        (value, copy.copy(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, (list, dict, set))
    ]
    python_random = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_random)
        for part, values in attributes:
            part.__dict__.clear()
            part.__dict__.update(values)
        for container, entries in containers:
            container.clear()
            container.extend(entries) if isinstance(container, list) else container.update(entries)


def warm_up() -> None:
    """The first fake tensor imports for a second or two: do it on all ranks at once, not one after the other."""
    with FakeTensorMode():
        torch.empty(1) + 1
