"""Infers the output specs of a chunk without computing: by a run on fake tensors, or from its ``output_spec``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ldt._torch_private import FakeTensorMode, fake_tensor, pytree
from ldt.errors import LdtError
from ldt.runtime.comm.shards import NodeShards
from ldt.runtime.common.auxiliary_loss import LossRecord, declared_losses
from ldt.runtime.common.chunk_outputs import as_tensors
from ldt.runtime.common.error_text import safe_str
from ldt.runtime.common.kept import Kept, mark_kept
from ldt.runtime.common.output_marks import decode
from ldt.runtime.common.redact import InputTypeError, InputValueError, QuotingError, redacted, unredacted
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, describe
from ldt.runtime.dry_run.fake_module import FakeCopies
from ldt.runtime.dry_run.forward_hooks import skipped_hooks
from ldt.runtime.dry_run.grad_flow import DryRun, InferredOutputs, of_loss, unknown
from ldt.runtime.dry_run.isolation import host_random_states, isolated
from ldt.runtime.model.data_parallel import is_fully_sharded
from ldt.runtime.model.keywords import keywords_of, output_spec_of

__all__ = ["dry_run", "infer", "infer_reach", "infer_specs", "needs_values", "warm_up"]

# Raised by a correct forward that reads values of a fake tensor, or runs an operator without a fake implementation.
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
_SIGNS = ("FakeTensor", "fake impl", "not supported for tensor subclasses")  # in the text of a RuntimeError
_Result = TypeVar("_Result")
_Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional, by keyword
_DECLARE = (
    "declare the result: give the module a method output_spec(*input_specs) that returns one ldt.runtime.TensorSpec "
    "per output"
)
_ADVICE = f". If its forward is correct but depends on values, {_DECLARE}"


def needs_values(error: Exception) -> bool:
    """Whether a correct forward may raise ``error`` on fake tensors, which have no values."""
    return isinstance(error, _NEEDS_VALUES) or any(sign in safe_str(error) for sign in _SIGNS)


def infer_specs(*arguments: Any, **options: Any) -> HopSpecs:
    """Return only the output specs that ``infer`` finds."""
    return infer(*arguments, **options).specs


def infer(
    chunk: int,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
    shards: NodeShards | None = None,
) -> InferredOutputs:
    """Infer what ``module`` returns for arguments that are tensors, or TensorSpecs of tensors on ``device``.

    Calls ``module.output_spec`` if it exists, with the specs of all arguments and of the keywords that it takes, but
    with the metadata themselves. Otherwise does a dry run. Raises LdtError naming the chunk on failure.
    """
    declared = output_spec_of(module)
    shards = shards or NodeShards()

    def read(run: DryRun) -> InferredOutputs:
        tensors = as_tensors(run.output, chunk)
        specs = mark_kept(shards.specs_of(tensors, f"output of chunk {chunk}"), tensors.num_kept)
        if not training:
            return InferredOutputs(specs, losses=run.losses)
        may = run.may_require_grad(tensors)
        specs = tuple(replace(spec, requires_grad=flag) for spec, flag in zip(specs, may, strict=True))
        return InferredOutputs(specs, run.reaches(tensors), run.reentrant(tensors), run.losses)

    try:
        if declared is not None:
            specs = _declared(declared, args, kwargs)
            reaches = (unknown(_specs_in(args)),) * len(specs)
            answer = InferredOutputs(specs, reaches, losses=declared_losses(module))
        elif is_fully_sharded(module):
            raise LdtError(f"modules in fully_shard cannot run on fake tensors: {_DECLARE}")
        else:
            answer = dry_run(module, args, kwargs, device, training, shards, read)
    except Exception as error:
        tensors = _specs_in((*args, *kwargs.values()))
        what = f"cannot tell what chunk {chunk} ({type(module).__name__}) returns for {describe(tensors)}"
        advice = _ADVICE if declared is None and needs_values(error) else ""
        raise QuotingError(
            f"{what}: {unredacted(error)[0].rstrip('. ')}{advice}",
            plain=f"{what}: {redacted(error).rstrip('. ')}{advice}",
        ) from error
    if training:
        return answer
    return InferredOutputs(tuple(spec.without_grad() for spec in answer.specs), losses=answer.losses)


def infer_reach(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    shards: NodeShards,
    loss_trains: bool = False,
) -> InferredOutputs:
    """Infer how far the gradient of a loss reaches back through the last chunk, whatever it returns.

    With ``loss_trains`` the loss has trained weights and may use an output that requires no gradient. If the chunk
    cannot run on fake tensors, the reach is unknown.
    """

    def read(run: DryRun) -> InferredOutputs:
        leaves = [leaf for leaf in pytree.tree_leaves(run.output) if isinstance(leaf, torch.Tensor)]
        differentiable = [t for t in leaves if t.requires_grad or (loss_trains and not _is_whole_number(t))]
        return InferredOutputs((), (of_loss(run, differentiable),), run.reentrant(leaves))

    if not is_fully_sharded(module):
        with suppress(Exception):  # a faulty forward raises when the chunk runs
            return dry_run(module, args, kwargs, device, True, shards, read)
    return InferredOutputs((), (unknown(_specs_in(args)),))


def _declared(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> HopSpecs:
    """Return the specs that an ``output_spec`` declares."""
    of_args, of_kwargs = _with_specs((args, kwargs))
    takes = keywords_of(method)
    of_kwargs |= {name: kwargs[name] for name in takes.metadata if name in kwargs}
    given, named = decode(of_args)
    outputs = method(*given, **(takes.pick(of_kwargs, len(given)) | named))
    entries = (outputs,) if isinstance(outputs, (TensorSpec, Kept)) else tuple(outputs)
    kept = [entry.tensor for entry in entries if isinstance(entry, Kept)]
    specs = (*(entry for entry in entries if not isinstance(entry, Kept)), *kept)
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise InputTypeError(f"output_spec must return TensorSpecs, got {kinds}")
    return mark_kept(tuple(map(_with_positive_shard, specs)), len(kept))


def _specs_in(values: Any) -> HopSpecs:
    leaves = pytree.tree_leaves(_with_specs((values, {})))
    return tuple(leaf for leaf in leaves if isinstance(leaf, TensorSpec))


def _with_positive_shard(spec: TensorSpec) -> TensorSpec:
    """Return the spec with a non-negative ``shard``. Raises ValueError if there is no such dimension."""
    dims = len(spec.shape)
    if spec.shard is None:
        return spec
    if not -dims <= spec.shard < dims or spec.order:
        raise InputValueError(
            f"the shard of a spec that output_spec returns must be one of its {dims} dimensions, in the default memory "
            f"order; got {spec!r}"
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
    read: Callable[[DryRun], _Result],
) -> _Result:
    """Run a copy of the module on fake tensors and return what ``read`` makes of the run.

    Arguments are tensors or TensorSpecs. The run has no data, draws no random numbers and skips user-defined hooks. It
    leaves no trace in the module, in what its attributes hold, or in what its functions can reach. Raises LdtError if
    a fake tensor is kept nevertheless.
    """
    answer, made = _dry_run(module, args, kwargs, device, training, shards, read)
    if _any_alive(made):
        gc.collect()
    if _any_alive(made):
        raise LdtError(
            "its forward keeps tensors that a dry run cannot remove: in an object of a compiled class, or in a "
            "reference cycle (a hook of their own graph, as save_on_cpu() makes on a CPU). The next forward would find "
            f"tensors without values. Keep them elsewhere, or {_DECLARE}"
        )
    return answer


def _dry_run(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
    shards: NodeShards,
    read: Callable[[DryRun], _Result],
) -> tuple[_Result, list[weakref.ref[torch.Tensor]]]:
    """Also return weak references to the tensors of the run."""
    mode = _FakeTensors()
    copies, second_copies = FakeCopies(mode), FakeCopies(mode)

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return mode.from_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            return _fake_of(TensorSpec.of(leaf), leaf.device, shards)
        return _fake_of(leaf, device, shards) if isinstance(leaf, TensorSpec) else leaf

    def run(fake_module: nn.Module, copies: FakeCopies) -> DryRun:
        drawn = host_random_states()
        fake_args, fake_kwargs = pytree.tree_map(fake, (tuple(args), kwargs))
        nodes = enumerate(getattr(arg, "grad_fn", None) for arg in fake_args)
        inputs = {i: node for i, node in nodes if node is not None}
        record = LossRecord()
        with record.recording():
            called_with, named = decode(fake_args)
            output = fake_module(*called_with, **(fake_kwargs | named))
        state_changed = copies.state_changed() or host_random_states() != drawn
        trained = [parameter for parameter in fake_module.parameters() if parameter.requires_grad]
        return DryRun(
            output, inputs, trained, state_changed, any(skipped_hooks(module)), tuple(record.values)
        )

    with (
        isolated(module, device),
        torch.inference_mode(False),  # as steps and evals run
        torch.set_grad_enabled(training),
        mode,
        copies,
        second_copies,
    ):
        fake_module = copies.copy_of(module)
        first = run(fake_module, copies)
        answer = read(first)
        if first.state_changed and training:
            with suppress(Exception):  # a module that cannot run twice keeps its uncertain reach
                answer = _merge_runs(first, run(second_copies.copy_of(fake_module), second_copies), read)
    return answer, mode.made


def _merge_runs(first: DryRun, second: DryRun, read: Callable[[DryRun], _Result]) -> _Result:
    """Merge two runs: the result is certain if they agree and the second, which continued the first, changed no state.

    That is the case for a cache that is filled once, but not for a counter.
    """
    answers = [read(replace(run, state_changed=False)) for run in (first, second)]
    return answers[0] if answers[0] == answers[1] and not second.state_changed else read(first)


class _FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Records weak references to the fake tensors that it creates."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.made: list[weakref.ref[torch.Tensor]] = []

    def from_tensor(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(super().from_tensor(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorded(super().__torch_dispatch__(func, types, args, kwargs or {}))

    def _recorded(self, result: Any) -> Any:
        self.made += [
            weakref.ref(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ]
        return result


def _fake_of(spec: TensorSpec, device: torch.device, shards: NodeShards) -> torch.Tensor:
    part = spec.from_wire(torch.empty(shards.local_shape(spec), dtype=spec.dtype, device=device))
    if spec.requires_grad and torch.is_grad_enabled():
        # Not a leaf, so that it may be modified in place, like a received tensor.
        part = part.requires_grad_().clone()
    return shards.whole(part, spec)


def _any_alive(tensors: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    return any(tensor() is not None for tensor in tensors)


def _is_whole_number(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def warm_up() -> None:
    """Create the first fake tensor: its imports take a second or two, better on all ranks at once than in turn."""
    with FakeTensorMode():
        torch.empty(1) + 1
