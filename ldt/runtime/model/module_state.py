"""Lists the parameters and buffers of a rank's modules, and tells which ranks hold the same shard of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ldt._torch_private import is_traceable_wrapper_subclass
from ldt.runtime.common.rank_info import RankInfo

__all__ = [
    "HasWholeModelNames",
    "HeldTensor",
    "all_submodules",
    "is_tensor_parallel",
    "repeats_elements",
    "sharded_over",
    "tensors_held",
    "unwrapped_name",
    "unwrapped_tensors",
]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # by torch.compile and by activation checkpointing


@runtime_checkable
class HasWholeModelNames(Protocol):
    """A chunk that knows what a tensor of its ``state_dict`` is called in the whole model."""

    def whole_model_name(self, name: str) -> str: ...


def all_submodules(module: nn.Module) -> dict[nn.Module, None]:
    """Return ``module.modules()`` in no particular order, in a third of the time: it is called in every step."""
    found, left = {module: None}, [module]
    while left:
        for part in left.pop()._modules.values():
            if part is not None and part not in found:
                found[part] = None
                left.append(part)
    return found


def unwrapped_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, or recursively the tensors that a traceable wrapper subclass wraps."""
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a DTensor of torch 2.13 also lists its device mesh
            yield from unwrapped_tensors(part)


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether several elements share one memory location, as in a tensor from ``expand``."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def unwrapped_name(name: str) -> str:
    """Remove the prefixes that wrappers of modules add to a tensor's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class HeldTensor(NamedTuple):
    """A parameter or buffer, ``name`` in ``where``, such as "chunk 1"."""

    where: str
    name: str
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        return f"{self.name} of {self.where}"

    def describe(self) -> str:
        """Return dtype, shape, placements and whether it requires a gradient."""
        if is_lazy(self.tensor):
            return "uninitialized"
        split = f" {self.tensor.placements}" if isinstance(self.tensor, DTensor) else ""
        kind = str(self.tensor.dtype).removeprefix("torch.")
        wanted = ", requires a gradient" if self.tensor.requires_grad else ""
        shape = "[nested]" if self.tensor.is_nested else list(self.tensor.shape)
        return f"{kind}{shape}{split}{wanted}"


def tensors_held(modules: Mapping[str, nn.Module]) -> Iterator[HeldTensor]:
    """Yield parameters and buffers of ``modules``; a tensor with several names in one module once, by the first."""
    for where, module in modules.items():
        for name, parameter in module.named_parameters():
            yield HeldTensor(where, name, parameter)
        for name, buffer in module.named_buffers():
            yield HeldTensor(where, name, buffer)


def is_tensor_parallel(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is this rank's part of a tensor-parallel layer's weight, marked as in Megatron-LM."""
    return not isinstance(tensor, DTensor) and bool(getattr(tensor, "tensor_model_parallel", False))


def sharded_over(tensor: torch.Tensor, rank_info: RankInfo) -> tuple[bool, bool]:
    """Whether ``tensor`` is sharded over the ranks of a node, and whether over replicas."""
    if not isinstance(tensor, DTensor):
        return is_tensor_parallel(tensor), False
    dims = [
        tensor.device_mesh if tensor.device_mesh.ndim == 1 else _dimension(tensor.device_mesh, dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return any(map(rank_info.spans_node, dims)), any(map(rank_info.spans_replicas, dims))


def _dimension(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    names = mesh.mesh_dim_names
    return mesh if names is None else mesh[names[dim]]
