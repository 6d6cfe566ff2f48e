"""What every hop of a step will carry, found without computing anything: chunks run on fake tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ldt.errors import LdtError
from ldt.runtime.chunk import as_tensors
from ldt.runtime.mesh import Mesh
from ldt.runtime.specs import HopSpecs, TensorSpec, describe, specs_of

__all__ = ["ShapeBook", "infer_specs"]


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
    numbers, and its buffers and attributes are put back. Raises LdtError naming the chunk if that does not work.
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
        raise LdtError(
            f"cannot tell what chunk {chunk} ({type(module).__name__}) returns for {describe(tensors)}: "
            f"{type(error).__name__}: {error}. If its forward is right but depends on values, declare the result: "
            "give the module a method output_spec(*input_specs) that returns one ldt.runtime.TensorSpec per output"
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
        return specs_of(as_tensors(output, chunk))


def _fake_of(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    tensor = spec.from_wire(torch.empty(spec.wire_shape, dtype=spec.dtype, device=device))
    if not (spec.requires_grad and torch.is_grad_enabled()):
        return tensor
    # Not a leaf: like a received tensor, it may be modified in place.
    return tensor.requires_grad_().clone()


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves behind: attributes of all submodules, and the states of random generators."""
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    registered: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (part.__dict__[registry], dict(part.__dict__[registry]))
        for part in module.modules()
        for registry in ("_parameters", "_buffers", "_modules")
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
        for registry, entries in registered:
            registry.clear()
            registry.update(entries)


def _warm_up() -> None:
    """The first fake tensor imports for a second or two: do it on all ranks at once, not one after the other."""
    with FakeTensorMode():
        torch.empty(1) + 1


class ShapeBook:
    """The specs of hops c -> c+1 for every microbatch of a step, the same on all ranks.

    The edge says what hop 0 carries; for specs not met before, each chunk's leader infers its output and tells all.
    Nothing is asked again until ``forget``.
    """

    def __init__(self, mesh: Mesh, chunks: Mapping[int, nn.Module]) -> None:
        self._mesh = mesh
        self._topology = mesh.topology
        self._chunks = chunks
        if mesh.topology.num_stages > 1:
            _warm_up()
        self._heads: dict[tuple[object, bool], HopSpecs] = {}
        self._outputs: dict[tuple[int, HopSpecs, bool], HopSpecs] = {}

    def forget(self) -> None:
        """Infer everything anew from the next step on. To be called on all ranks between the same two steps."""
        self._heads.clear()
        self._outputs.clear()

    def head_output(
        self, signature: object, args: Sequence[Any], kwargs: dict[str, Any], training: bool
    ) -> HopSpecs:
        """What hop 0 carries for these arguments of the head. Edge only, local."""
        key = (signature, training)
        if key not in self._heads:
            self._heads[key] = infer_specs(0, self._chunks[0], args, kwargs, self._mesh.device, training)
        return self._heads[key]

    def hops(self, first: HopSpecs, replica: int, training: bool) -> list[HopSpecs]:
        """What each hop carries when hop 0 carries ``first`` in ``replica``. A collective call of all ranks."""
        hops = [first]
        for chunk in range(1, self._topology.tail):
            key = (chunk, hops[-1], training)
            if key not in self._outputs:
                self._outputs[key] = self._ask(chunk, hops[-1], replica, training)
            hops.append(self._outputs[key])
        return hops

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
                f"{describe(agreed)}, topology rank {self._mesh.rank} says {describe(mine)}; "
                "they must hold equal modules"
            )
        return agreed
