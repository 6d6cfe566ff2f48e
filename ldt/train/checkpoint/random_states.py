"""Captures and restores a rank's random states: Python, numpy if imported, torch on the CPU and the mesh's device."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ldt.schema import fit
from ldt.train.checkpoint.files import damaged

__all__ = ["capture", "restorer"]


def capture(device: torch.device) -> dict[str, Any]:
    """Return all of them in JSON types."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _as_text(torch.get_rng_state()),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    generator = _generator(device)
    if generator is not None:
        states[device.type] = _as_text(generator.get_rng_state(device))
    return states


def restorer(states: dict[str, Any], device: torch.device, file: Path) -> Callable[[], None]:
    """Return a function that sets the states in ``states``, read from ``file``, that this process uses.

    Raises CheckpointError naming the file if one is damaged.
    """
    numpy: Any = sys.modules.get("numpy")
    generator = _generator(device)
    steps: list[Callable[[], object]] = []
    try:
        of_python = fit(states["python"], tuple[int, tuple[int, ...], float | None])
        random.Random().setstate(of_python)
        steps.append(lambda: random.setstate(of_python))
        of_torch = _as_tensor(states["torch"])
        torch.Generator().set_state(of_torch)
        steps.append(lambda: torch.set_rng_state(of_torch))
        if numpy is not None and "numpy" in states:
            of_numpy = fit(states["numpy"], tuple[str, list[int], int, int, float])
            if of_numpy[2] > len(of_numpy[1]):  # numpy would read past the end
                raise ValueError("the position in numpy's state is past its end")
            numpy.random.RandomState().set_state(of_numpy)
            steps.append(lambda: numpy.random.set_state(of_numpy))
        if generator is not None and device.type in states:
            of_device = _as_tensor(states[device.type])
            steps.append(lambda: generator.set_rng_state(of_device, device))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(
            file, f"its random states are invalid: {type(error).__name__}: {str(error)[:200]}"
        ) from error

    def restore() -> None:
        for step in steps:
            step()

    return restore


def _generator(device: torch.device) -> Any:
    """The module with the device's generator; None for the CPU and for a device without one."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None


def _as_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _as_tensor(text: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(fit(text, str), validate=True)), dtype=torch.uint8)
