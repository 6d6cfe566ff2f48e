"""Packs and unpacks the step message from the edge to every rank: the call, shapes of hops, masks and positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ldt._C import (
    MAX_METADATA_ELEMENTS,
    METADATA_NAMES,
    has_metadata_kernels,
    pack_called_off,
    pack_step,
    unpack_message,
)
from ldt.errors import MetadataError
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec

__all__ = [
    "MAX_METADATA_ELEMENTS",
    "METADATA_NAMES",
    "MicrobatchMetadata",
    "StepCalledOff",
    "StepMessage",
    "has_metadata_kernels",
    "pack",
    "unpack",
]


@dataclass(frozen=True, eq=False)
class MicrobatchMetadata:
    """What leaves the edge of one microbatch besides activations and gradients.

    ``hops`` has the specs of what the first chunk sends and, if it keeps anything, of what it keeps. ``tensors`` are of
    bool or any integer dtype and named as in ``METADATA_NAMES``. Two objects never compare equal, as ``==`` of tensors
    is not a bool.
    """

    id: int
    hops: tuple[HopSpecs, ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMessage:
    """One call of ``step`` or ``eval`` with all of its microbatches.

    ``plan`` is the plan's digest. ``setting`` describes the modes that may change shapes for equal inputs. ``autocast``
    is the dtype of autocast, None if it is off.
    """

    mode: Literal["step", "eval"]
    plan: str
    setting: str
    autocast: str | None
    microbatches: tuple[MicrobatchMetadata, ...]


@dataclass(frozen=True)
class StepCalledOff:
    """Sent instead of a StepMessage if the edge cannot make the call. ``error_type`` names the error's class."""

    error_type: str
    error_text: str


def pack(message: StepMessage | StepCalledOff, *, max_elements: int = MAX_METADATA_ELEMENTS) -> torch.Tensor:
    """Pack the message into bytes: uint8 ``[n]`` on the CPU (docs/wire_format.md).

    Tensors may be on the CPU or on one device, where they are read in order with its current stream. Equal content
    gives equal bytes on every device. The GIL is released while rows are scanned. Raises MetadataError for names and
    tensors that must not cross, and for more than ``max_elements`` elements.
    """
    if isinstance(message, StepCalledOff):
        return pack_called_off(
            error_type=_encodable(message.error_type),
            error_text=_encodable(message.error_text),
        )
    if message.mode not in ("step", "eval"):
        raise MetadataError(f"expected mode 'step' or 'eval', got {message.mode!r}; use one of the two")
    return pack_step(
        training=message.mode == "step",
        plan=message.plan,
        setting=message.setting,
        autocast=message.autocast,
        microbatches=message.microbatches,
        max_elements=max_elements,
    )


def unpack(
    data: torch.Tensor, device: torch.device | str = "cpu", *, max_elements: int = MAX_METADATA_ELEMENTS
) -> StepMessage | StepCalledOff:
    """Unpack a message of ``pack``; its tensors are rebuilt on ``device``, bit-equal and contiguous.

    ``data`` may be untrusted: anything but a message of this version raises MetadataError, and at most ``max_elements``
    elements are allocated. On a device the tensors are ready for its current stream; the host does not wait. The
    tensors share one buffer, which lives as long as any of them. On the meta device they have shapes and no elements.
    """
    content = unpack_message(
        data,
        device=torch.device(device),
        max_elements=max_elements,
        spec_type=TensorSpec,
        microbatch_type=MicrobatchMetadata,
    )
    return StepMessage(*content) if content[0] is not None else StepCalledOff(*content[1:])


def _encodable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, as file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
