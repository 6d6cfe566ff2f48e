"""The random states of a rank: of Python, of numpy if it is in use, of torch on the CPU and on the mesh's device."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch

from ldt.errors import LdtError

__all__ = ["capture", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """All of them, in types of JSON."""
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


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set those that ``states`` has and this process uses. Raises LdtError if one is damaged, before any is set."""
    numpy: Any = sys.modules.get("numpy")
    try:
        version, words, gauss = states["python"]
        of_python = version, tuple(words), gauss
        of_torch = _as_tensor(states["torch"])
        of_numpy = tuple(states["numpy"]) if "numpy" in states else None
        of_device = _as_tensor(states[device.type]) if device.type in states else None
    except (KeyError, TypeError, ValueError) as error:
        raise LdtError(f"the random states of this checkpoint are damaged: {error!r}") from error
    random.setstate(of_python)
    torch.set_rng_state(of_torch)
    if numpy is not None and of_numpy is not None:
        numpy.random.set_state(of_numpy)
    generator = _generator(device)
    if generator is not None and of_device is not None:
        generator.set_rng_state(of_device, device)


def _generator(device: torch.device) -> Any:
    """The module that has the device's generator; None for the CPU, and for a device that has none."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None


def _as_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
