"""Every private name of PyTorch that the package uses, with the reason. Read in torch 2.13.

A PyTorch release may change these names without notice. Run the tests with a new release, and adapt this file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = [
    "AsyncCollectiveTensor",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "Store",
    "TCPStore",
    "UnsupportedFakeTensorException",
    "abort_group",
    "backward_optimizers",
    "connected_gloo",
    "default_store",
    "fake_tensor",
    "foreach_norm",
    "forward_hooks",
    "forward_pre_hooks",
    "global_forward_hooks",
    "grad_hooks",
    "groups_and_stores",
    "is_lru_cache",
    "is_registered",
    "is_traceable_wrapper_subclass",
    "local_tensor",
    "make_process_group",
    "nccl_communicator",
    "non_persistent_buffers",
    "optimizer_load_hooks",
    "pytree",
    "recompute_once",
    "storage_id",
    "storage_use_count",
    "tree_leaves",
    "validate_global_plan",
    "view_base",
    "with_grad_hooks",
    "without_dispatch_modes",
    "without_function_modes",
    "without_saved_tensors_hooks",
]

# FakeTensor, FakeTensorMode: infer shapes of outputs without computing them.
# pytree: nested inputs and outputs; torch.utils.pytree has no tree_map_only.
# AsyncCollectiveTensor: output of a chunk of DTensors that nothing has waited for.
# HashStore, Store, TCPStore: public as torch.distributed.TCPStore, which type checkers do not see.
# is_traceable_wrapper_subclass: detects tensors that wrap other tensors.


# -- process groups ----------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group, where meshes rendezvous. No public call returns it."""
    return c10d._get_default_store()


def make_process_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, store: Any
) -> dist.ProcessGroup:
    """Create the group of the global ``ranks`` over ``store``. Only they, among them this process, take part.

    ``name`` must be unique for the life of the store. ``dist.new_group(use_local_synchronization=True)`` would derive
    the name from the number of groups of the calling process, which differs between the ranks of a mesh.
    """
    ranks = list(ranks)
    group: dist.ProcessGroup
    with _without_communicator_split():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend,
            store,
            c10d.GroupName(name),
            timeout=timeout,
            group_desc=name,
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


@contextmanager
def connected_gloo() -> Iterator[None]:
    """Connect gloo groups when they are made, also if users have torch connect their own at first use."""
    lazy = os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    try:
        yield
    finally:
        if lazy is not None:
            os.environ["TORCH_GLOO_LAZY_INIT"] = lazy


@contextmanager
def _without_communicator_split() -> Iterator[None]:
    """Create the NCCL communicator anew: splitting the default one, if bound to a device, needs all its ranks."""
    default = c10d._get_default_group()
    bound = getattr(default, "bound_device_id", None)
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is still registered: destroying the default group unregisters all."""
    return group in c10d._world.pg_map


def abort_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group`` without flushing its queue, if this torch can."""
    getattr(c10d, "_abort_process_group", dist.destroy_process_group)(group)


def groups_and_stores() -> Iterator[tuple[dist.ProcessGroup, Any]]:
    """All process groups of this process, each with its store. A forked child must free neither."""
    for group, (_, store) in c10d._world.pg_map.items():
        yield group, store


def nccl_communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """Create the group's ``ncclComm_t`` on ``device`` and return its address. A collective call of its ranks."""
    backend: Any = group._get_backend(device)
    backend.eager_connect_single_device(device)
    return int(backend._comm_ptr())


# -- hooks -------------------------------------------------------------------------------------------------------


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks, each with whether it takes keyword arguments. Dry runs call only those that layers depend on."""
    by_name = module._forward_pre_hooks_with_kwargs
    return [(hook, key in by_name) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks, each with whether it takes keyword arguments."""
    by_name = module._forward_hooks_with_kwargs
    return [(hook, key in by_name) for key, hook in module._forward_hooks.items()]


def global_forward_hooks() -> list[Callable[..., Any]]:
    """The hooks before and after the forward of every module."""
    return [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()]


def grad_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks on the gradient of ``parameter``. They run before gradients are divided or reduced over replicas."""
    found: list[Callable[..., Any]] = []
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        found += (hooks or {}).values()
    return found


def backward_optimizers(parameter: torch.Tensor) -> list[Any]:
    """The optimizers that step in the backward of ``parameter`` (``_apply_optimizer_in_backward``)."""
    return getattr(parameter, "_in_backward_optimizers", None) or []


def with_grad_hooks(parameters: Iterable[torch.nn.Parameter | None]) -> list[torch.nn.Parameter]:
    """Return those with hooks or optimizers as above. One call for all of them: each step looks at every parameter."""
    return [
        parameter
        for parameter in parameters
        if parameter is not None
        and (
            parameter._backward_hooks
            or parameter._post_accumulate_grad_hooks
            or getattr(parameter, "_in_backward_optimizers", None)
        )
    ]


def optimizer_load_hooks(optimizer: torch.optim.Optimizer) -> Iterator[Mapping[int, Callable[..., Any]]]:
    """The hooks before and after ``load_state_dict``."""
    yield optimizer._optimizer_load_state_dict_pre_hooks
    yield optimizer._optimizer_load_state_dict_post_hooks


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers that are not in ``state_dict``."""
    return module._non_persistent_buffers_set


# -- modes -------------------------------------------------------------------------------------------------------


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Disable the caller's dispatch modes, such as a FLOP counter, during dry runs."""
    return _disable_current_modes()


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Disable the caller's function modes, except ``torch.device`` contexts, which decide where tensors are made."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    kept = [mode for mode in modes if isinstance(mode, DeviceContext)]
    _replace_modes(kept)
    try:
        yield
    finally:
        _replace_modes(modes)


def _replace_modes(modes: Sequence[Any]) -> None:
    for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Disable default hooks on saved tensors, such as those of ``save_on_cpu``."""
    engine = torch._C._autograd
    found = []
    while (pair := engine._top_saved_tensors_default_hooks(False)) is not None:
        found.append(pair)
        engine._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(found):
            engine._push_saved_tensors_default_hooks(*pair)


# -- tensors and graphs ------------------------------------------------------------------------------------------


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The base of ``tensor`` if autograd knows it as a view, otherwise ``tensor``."""
    return tensor._base if tensor._is_view() else tensor  # type: ignore[return-value]


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, without the autograd of ``to_local``; any other tensor unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def storage_id(storage: torch.UntypedStorage) -> int:
    """An id of the storage, equal for all Python objects of it."""
    return int(storage._cdata)


_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 1 << 30)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """The number of references to a storage, counting ``storage``; 2**30 if this torch cannot tell."""
    return _use_count(storage._cdata)


def recompute_once() -> AbstractContextManager[object]:
    """Let several backwards recompute once under ``torch.utils.checkpoint``. Older torch: each recomputes."""
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None else group()


def foreach_norm(
    tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of each tensor in few kernels, as ``torch.nn.utils.get_total_norm`` computes it."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def validate_global_plan(plans: Any, metadata: Any) -> list[str]:
    """Errors in the chunks of a checkpoint's tensors: overlaps, and elements in no chunk."""
    from torch.distributed.checkpoint import default_planner  # here, as only checkpoints need it

    found: Any = default_planner._validate_global_plan(plans, metadata)
    if isinstance(found, bool):  # up to torch 2.11, which logs the errors
        return [] if found else ["they overlap, or leave elements out"]
    return list(found)


def is_lru_cache(value: object) -> bool:
    """Whether ``value`` is a function in ``functools.lru_cache``. Its type has no public name in Python."""
    return isinstance(value, functools._lru_cache_wrapper)
