"""What every hop of a step will carry, found without computing anything: chunks run on fake tensors."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ldt.errors import LdtError
from ldt.runtime.chunk import as_tensors, refuse_wrappers
from ldt.runtime.disclosure import QuotingError, disclose, reveal
from ldt.runtime.mesh import Mesh
from ldt.runtime.specs import HopSpecs, TensorSpec, describe, specs_of

__all__ = ["ShapeBook", "infer_specs"]


# What a right forward may raise for want of values: it reads them, or runs an operator that is not known for fakes.
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
_SIGNS = ("FakeTensor", "fake impl", "not supported for tensor subclasses")  # of plain RuntimeErrors
_ADVICE = (
    ". If its forward is right but depends on values, declare the result: give the module a method "
    "output_spec(*input_specs) that returns one ldt.runtime.TensorSpec per output"
)


def _needs_values(error: Exception) -> bool:
    return isinstance(error, _NEEDS_VALUES) or any(sign in str(error) for sign in _SIGNS)


def infer_specs(
    chunk: int,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
) -> HopSpecs:
    """The specs of what ``module`` returns for arguments that are tensors, or TensorSpecs of tensors on ``device``.

    Calls ``module.output_spec`` if there is one. Otherwise runs the module on fake tensors: no data, no random
    numbers, and the attributes of the module and its parts are put back, with the entries of those that are lists,
    dicts or sets, but not what objects in them hold. Raises LdtError naming the chunk if that does not work.
    """
    declared: Callable[..., Any] | None = getattr(module, "output_spec", None)
    try:
        if declared is not None:
            of_args, of_kwargs = _with_specs(args, kwargs)
            outputs = declared(*of_args, **of_kwargs)
            specs = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
            if not all(isinstance(spec, TensorSpec) for spec in specs):
                raise TypeError(f"output_spec must return TensorSpecs, got {outputs!r}")
        else:
            specs = _run_on_fakes(chunk, module, args, kwargs, device, training)
    except Exception as error:
        tensors = [
            leaf for leaf in pytree.tree_leaves(_with_specs(args, kwargs)) if isinstance(leaf, TensorSpec)
        ]
        what = f"cannot tell what chunk {chunk} ({type(module).__name__}) returns for {describe(tensors)}"
        advice = _ADVICE if declared is None and _needs_values(error) else ""
        raise QuotingError(
            f"{what}: {reveal(error)[0].rstrip('. ')}{advice}",
            plain=f"{what}: {disclose(error).rstrip('. ')}{advice}",
        ) from error
    return specs if training else tuple(spec.without_grad() for spec in specs)


def _with_specs(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    specs: tuple[tuple[Any, ...], dict[str, Any]]
    specs = pytree.tree_map_only(torch.Tensor, TensorSpec.of, (tuple(args), kwargs))
    return specs


def _run_on_fakes(
    chunk: int,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    training: bool,
) -> HopSpecs:
    def fake(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _fake_of(TensorSpec.of(leaf), leaf.device)
        return _fake_of(leaf, device) if isinstance(leaf, TensorSpec) else leaf

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _restored(module), torch.set_grad_enabled(training), mode:
        named = [*module.named_parameters(), *module.named_buffers()]
        state: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named}
        fake_args, fake_kwargs = pytree.tree_map(fake, (tuple(args), kwargs))
        output = torch.func.functional_call(module, state, fake_args, fake_kwargs)
        tensors = as_tensors(output, chunk)
        refuse_wrappers(tensors, f"output of chunk {chunk}")
        return specs_of(tensors)


def _fake_of(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    tensor = spec.from_wire(torch.empty(spec.wire_shape, dtype=spec.dtype, device=device))
    if not (spec.requires_grad and torch.is_grad_enabled()):
        return tensor
    # Not a leaf: like a received tensor, it may be modified in place.
    return tensor.requires_grad_().clone()


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


def _warm_up() -> None:
    """The first fake tensor imports for a second or two: do it on all ranks at once, not one after the other."""
    with FakeTensorMode():
        torch.empty(1) + 1


Value = TypeVar("Value")


class _Recent(Generic[Value]):
    """The ``size`` answers used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, ask: Callable[[], Value]) -> Value:
        """The answer for ``key``, from ``ask`` if it is not there."""
        if key not in self._answers:
            self._answers[key] = ask()
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return self._answers[key]

    def clear(self) -> None:
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)


class ShapeBook:
    """The specs of hops c -> c+1 for every microbatch of a step, the same on all ranks.

    The edge says what hop 0 carries, and under which autocast; for specs not met before under that one, each chunk's
    leader infers its output and tells all. Answers are kept until ``forget``, the most recent 256 of the head and 1024
    of the other chunks. Hops within a node are found by the way and have no specs here.
    """

    def __init__(self, mesh: Mesh, chunks: Mapping[int, nn.Module]) -> None:
        self._mesh = mesh
        self._topology = mesh.topology
        self._chunks = chunks
        if mesh.topology.channels:
            _warm_up()
        self._heads: _Recent[HopSpecs] = _Recent(256)
        self._outputs: _Recent[HopSpecs] = _Recent(1024)

    def autocast(self) -> str | None:
        """The dtype that autocast casts to on this rank's device, None where it is off: other shapes for one input."""
        kind = self._mesh.device.type
        return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def forget(self) -> None:
        """Infer everything anew from the next step on. To be called on all ranks between the same two steps."""
        self._heads.clear()
        self._outputs.clear()

    def head_output(
        self, signature: object, args: Sequence[Any], kwargs: dict[str, Any], training: bool
    ) -> HopSpecs:
        """What hop 0 carries for these arguments of the head. Edge only, local."""
        if not self._topology.crosses(0):
            return ()
        key = (signature, training, self.autocast())
        return self._heads.get(
            key, lambda: infer_specs(0, self._chunks[0], args, kwargs, self._mesh.device, training)
        )

    def hops(self, first: HopSpecs, replica: int, training: bool, autocast: str | None) -> list[HopSpecs]:
        """What each hop carries when hop 0 carries ``first`` in ``replica``. A collective call of all ranks.

        ``autocast`` is the edge's: all ranks must use the same one, so that all ask again when it changes.
        """
        hops = [first]
        for chunk in range(1, self._topology.tail):
            if self._topology.crosses(chunk):
                hops.append(self._output(chunk, hops[-1], replica, training, autocast))
            else:
                hops.append(())
        return hops

    def _output(
        self, chunk: int, inputs: HopSpecs, replica: int, training: bool, autocast: str | None
    ) -> HopSpecs:
        key = (chunk, inputs, training, autocast)
        return self._outputs.get(key, lambda: self._ask(chunk, inputs, replica, training))

    def _ask(self, chunk: int, inputs: HopSpecs, replica: int, training: bool) -> HopSpecs:
        """The chunk's own ranks infer; its leader's word goes to all."""
        node = self._topology.node_at(chunk, replica)
        mine = None
        if node == self._mesh.node:
            mine = infer_specs(chunk, self._chunks[chunk], inputs, {}, self._mesh.device, training)
        message = None if mine is None else [spec.to_json() for spec in mine]
        answer = self._mesh.control.broadcast(message, self._topology.leader_of(node))
        agreed = tuple(map(TensorSpec.from_json, answer))
        if mine is not None and mine != agreed:
            raise LdtError(
                f"the ranks of node {node} disagree on what chunk {chunk} returns: its leader says "
                f"{describe(agreed)}, rank {self._mesh.ranks[self._mesh.rank]} says {describe(mine)}; "
                "they must hold equal modules"
            )
        return agreed
