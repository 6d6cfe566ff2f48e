"""Every private name of PyTorch that the package uses, with the reason. Read in torch 2.13.

A release of PyTorch may change what is here without notice: a new one is tried by running the tests, and mended here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import _validate_global_plan
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
    "TCPStore",
    "UnsupportedFakeTensorException",
    "abort_group",
    "backward_optimizers",
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
    "without_dispatch_modes",
    "without_function_modes",
    "without_saved_tensors_hooks",
]

# FakeTensor, FakeTensorMode: shapes of a chunk's outputs without computing them.
# pytree: nested inputs and outputs; torch.utils.pytree has no public twin of tree_map_only.
# HashStore, TCPStore: torch.distributed exports them only where it was built with all backends.
# AsyncCollectiveTensor: what a chunk of DTensors returns before anyone has waited for it.
# is_traceable_wrapper_subclass: tells tensors that are made of other tensors.


# -- process groups ----------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group: meshes meet there. No public call returns it."""
    return c10d._get_default_store()


def make_process_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, store: Any
) -> dist.ProcessGroup:
    """Make the group of the global ``ranks``, of which this process is one; only they take part, over ``store``.

    ``name`` must be unique for the life of the store. ``dist.new_group(use_local_synchronization=True)`` makes up its
    name by counting the groups of the calling process, and ranks of one mesh have different numbers of groups.
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
def _without_communicator_split() -> Iterator[None]:
    """Splitting the default NCCL communicator (``init_process_group(device_id=...)``) needs all its ranks at once."""
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
    """Whether torch still knows ``group``: destroying the default group makes it forget all."""
    return group in c10d._world.pg_map


def abort_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group`` without flushing what is queued in it, where this torch can."""
    getattr(c10d, "_abort_process_group", dist.destroy_process_group)(group)


def groups_and_stores() -> Iterator[tuple[dist.ProcessGroup, Any]]:
    """All process groups of this process, each with its store: a forked child must not free either."""
    for group, (_, store) in c10d._world.pg_map.items():
        yield group, store


def nccl_communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """The address of the group's ``ncclComm_t`` on ``device``, made now, together with all other ranks of the group."""
    backend: Any = group._get_backend(device)
    backend.eager_connect_single_device(device)
    return int(backend._comm_ptr())


# -- hooks -------------------------------------------------------------------------------------------------------


def forward_pre_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """Each hook, and whether it takes keyword arguments. Dry runs run only those that layers depend on."""
    by_name = module._forward_pre_hooks_with_kwargs
    return [(hook, key in by_name) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """Each hook, and whether it takes keyword arguments."""
    by_name = module._forward_hooks_with_kwargs
    return [(hook, key in by_name) for key, hook in module._forward_hooks.items()]


def global_forward_hooks() -> list[Callable[..., Any]]:
    """Hooks on the forward of every module, before and after it."""
    return [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()]


def grad_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks on the gradient of ``parameter``: they run before gradients are divided or reduced over replicas."""
    found: list[Callable[..., Any]] = []
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        found += (hooks or {}).values()
    return found


def backward_optimizers(parameter: torch.Tensor) -> list[Any]:
    """The optimizers that step in the backward of ``parameter`` (``_apply_optimizer_in_backward``)."""
    return getattr(parameter, "_in_backward_optimizers", None) or []


def optimizer_load_hooks(optimizer: torch.optim.Optimizer) -> Iterator[Mapping[int, Callable[..., Any]]]:
    """Hooks around ``load_state_dict``, before and after it."""
    yield optimizer._optimizer_load_state_dict_pre_hooks
    yield optimizer._optimizer_load_state_dict_post_hooks


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of buffers that are not part of ``state_dict``."""
    return module._non_persistent_buffers_set


# -- modes -------------------------------------------------------------------------------------------------------


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Dry runs must not reach modes of the caller, such as a FLOP counter."""
    return _disable_current_modes()


@contextmanager
def without_function_modes() -> Iterator[None]:
    """The same for function modes, but for ``torch.device`` contexts, which decide where tensors are made."""
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
    """The same for default hooks on saved tensors, as of ``save_on_cpu``."""
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
    """The tensor of which autograd knows ``tensor`` as a view; itself if there is none."""
    return tensor._base if tensor._is_view() else tensor  # type: ignore[return-value]


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without the autograd of ``to_local``; any other tensor as it is."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def storage_id(storage: torch.UntypedStorage) -> int:
    """Equal for Python objects of one storage."""
    return int(storage._cdata)


_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 1 << 30)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many references there are to a storage, counting ``storage``; very many where this torch cannot tell."""
    return _use_count(storage._cdata)


def recompute_once() -> AbstractContextManager[object]:
    """Let several backwards recompute once under ``torch.utils.checkpoint``. Older torch: each recomputes."""
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None else group()


def foreach_norm(
    tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of each tensor, in few kernels: what ``torch.nn.utils.get_total_norm`` uses."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def validate_global_plan(plans: Any, metadata: Any) -> list[str]:
    """What is wrong with the chunks of a checkpoint's tensors: overlaps, and elements that none of them has."""
    found: Any = _validate_global_plan(plans, metadata)
    if isinstance(found, bool):  # torch 2.11 writes what it found to its log
        return [] if found else ["they overlap, or leave something out"]
    return list(found)


def is_lru_cache(value: object) -> bool:
    """Whether ``value`` is a function of ``functools.lru_cache``; of Python, whose type has no public name."""
    return isinstance(value, functools._lru_cache_wrapper)
