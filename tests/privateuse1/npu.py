"""Registers the test device as "npu", with a stand-in for HCCL, as torch_npu does on an Ascend machine.

``start`` is called by the functions that run on ranks, never while tests are collected: it cannot be undone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ldt.testing.slowness import slowness_at_start

ROOT = Path(__file__).parents[2]
# Where `LDT_BUILD_TESTS=ON pip install --editable .` builds, unless the variable names another build folder.
BUILD = Path(os.environ.get("LDT_BUILD_DIR", ROOT / "build" / "latest"))
MODULE = BUILD / f"_test_device{sysconfig.get_config_var('EXT_SUFFIX')}"
WITHOUT_ABORT = "hccl_without_abort"  # as HCCL is today
# Arguments of late() and of connect() for everything that moves payloads.
TRANSPORTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "c10d": ({}, {"transport": "c10d"}),
    "copy engine": ({}, {"transport": "copy_engine"}),
    "host": ({}, {"transport": "host"}),
    "host without copy engine": ({"copy_engine": False}, {"transport": "host"}),
}


@functools.cache
def start() -> Any:
    """Register the device in this process, for good. Returns the compiled module with its settings."""
    # RTLD_GLOBAL: ldt looks up the functions of the device in all loaded libraries.
    ctypes.CDLL(str(BUILD / "libldt_test_device.so"), ctypes.RTLD_GLOBAL)
    loader = importlib.machinery.ExtensionFileLoader("_test_device", str(MODULE))
    spec = importlib.util.spec_from_loader("_test_device", loader)
    assert spec is not None
    compiled = importlib.util.module_from_spec(spec)
    loader.exec_module(compiled)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _DeviceModule(compiled))
    for name, can_abort in (("hccl", True), (WITHOUT_ABORT, False)):
        make = functools.partial(_make_group, compiled, can_abort)
        dist.Backend.register_backend(name, make, devices=["npu"])
    return compiled


@contextmanager
def late(seed: int, most_microseconds: int = 2000, *, copy_engine: bool = True) -> Iterator[torch.device]:
    """This rank's device, whose streams are late at random. Raises the errors it detected at the end.

    A real NPU has no ``copy_engine``.
    """
    compiled = start()
    compiled.refuse_copy_engine("" if copy_engine else "it is a paperweight")
    index = dist.get_rank()
    torch.accelerator.set_device_index(index)
    compiled.delay_all(seed=seed * 100 + index, most_microseconds=most_microseconds)
    yield torch.device("npu", index)
    compiled.delay_all(seed=0, most_microseconds=0)
    compiled.synchronize_all()
    compiled.refuse_copy_engine("")
    written = compiled.writes_after_free()
    assert written == 0, f"{written} blocks of memory were written to after they had been freed"


def sleep(milliseconds: float, stream: torch.Stream | None = None) -> None:
    """Keep a stream, the current one by default, busy, as torch.cuda._sleep does. Longer on a slow machine."""
    stream = torch.accelerator.current_stream() if stream is None else stream
    start().sleep(stream, int(1000 * milliseconds * slowness_at_start()))


def hccl_group(*ranks: int) -> dist.ProcessGroup:
    """Create a group of the stand-in for its members. Every rank of the world calls it."""
    return dist.new_group(list(ranks), backend="hccl")


def _make_group(
    compiled: Any, can_abort: bool, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Any:
    return compiled.make_group(dist.ProcessGroupGloo(store, rank, size, timeout), timeout, can_abort)


class _DeviceModule(ModuleType):
    """The part of ``torch.npu`` that torch and ldt use; most of it is torch.accelerator's."""

    Stream = torch.Stream
    Event = torch.Event
    current_device = staticmethod(torch.accelerator.current_device_index)
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_device = staticmethod(torch.accelerator.set_device_index)
    synchronize = staticmethod(torch.accelerator.synchronize)

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return int(start().DEVICES)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def stream(stream: torch.Stream) -> torch.Stream:
        return stream  # is a context manager itself

    def __init__(self, compiled: Any) -> None:
        super().__init__("torch.npu")
        self.default_generators: tuple[torch.Generator, ...] = tuple(compiled.generators())

    def get_rng_state(self, device: int | torch.device) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: int | torch.device) -> None:
        self._generator(device).set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def _generator(self, device: int | torch.device) -> torch.Generator:
        return self.default_generators[device.index if isinstance(device, torch.device) else device]

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False
