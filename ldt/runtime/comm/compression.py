"""Compression of tensors that cross links between sites: which messages, which of their tensors, and how.

Only floating-point tensors that require a gradient are packed, and their gradients. Others (masks, positions, rotary
tables) cross as they are. In an eval, what would require a gradient in a step is packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, Union, get_args

import torch

from ldt._C import has_8bit_kernels, pack_8bit, unpack_8bit
from ldt.runtime.comm.transfer_modes import link_of, links_by_stages
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.topology import Channel, Topology

__all__ = [
    "Compression",
    "CompressionChoice",
    "Compressions",
    "Scheme",
    "pack",
    "packs",
    "unpack",
    "wire_bytes",
]

Scheme = Literal["none", "bf16", "8bit"]
_FORMAT = 1  # of packed tensors (docs/wire_format.md)
_BLOCK = 128
_PACKED: dict[Scheme, tuple[torch.dtype, ...]] = {
    "none": (),
    "bf16": (torch.float32,),
    "8bit": (torch.float32, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class Compression:
    """How the tensors of a link are packed.

    ``"bf16"`` rounds float32 to bfloat16: an element is off by at most 1/256 of itself from 1.2e-38 on, and what is
    over 3.39e38 becomes infinite. ``"8bit"`` packs float32, bfloat16 and float16 as fp8 e4m3 in blocks of 128 elements
    with a scale each: an element x of a block whose largest finite magnitude is m is off by at most
    ``max(abs(x) / 16, m / 229376)``. NaN, infinities and zeros arrive as such.
    """

    activations: Scheme = "none"
    gradients: Scheme = "none"

    def __post_init__(self) -> None:
        for scheme in astuple(self):
            _check_scheme(scheme)


CompressionChoice = Union[Scheme, Mapping[tuple[int, int], Compression]]  # noqa: UP007 (evaluated)


@dataclass(frozen=True)
class Compressions:
    """The compression of each link, by (lower, upper) stages. Others have none."""

    by_link: Mapping[tuple[int, int], Compression]

    @classmethod
    def of(cls, topology: Topology, choice: CompressionChoice, device: torch.device) -> Compressions:
        """``choice`` is one scheme for all links between sites, or a dict of ``Compression`` by link.

        Raises ValueError for an unknown scheme, a link within a site, and "8bit" on a device without kernels.
        """
        links = sorted({link_of(channel) for channel in topology.channels if not topology.is_local(channel)})
        if isinstance(choice, Mapping):
            by_link = links_by_stages("compression", choice, links, topology, "links between sites")
            for value in by_link.values():
                if not isinstance(value, Compression):
                    raise ValueError(
                        f"compression by link takes ldt.Compression, such as {{(0, 1): "
                        f"ldt.Compression(activations='8bit', gradients='bf16')}}, got {value!r}"
                    )
        else:
            by_link = dict.fromkeys(links, Compression(choice, choice))
        by_link = {link: value for link, value in by_link.items() if value != Compression()}
        if any("8bit" in astuple(value) for value in by_link.values()) and not has_8bit_kernels(device):
            raise ValueError(
                f"compression='8bit' needs kernels, which this build of ldt has not for {device.type}: use 'bf16'"
            )
        return cls(by_link)

    def scheme(self, channel: Channel) -> Scheme:
        """How the tensors of ``channel`` are packed."""
        compression = self.by_link.get(link_of(channel), Compression())
        return compression.activations if channel.direction == "F" else compression.gradients

    def to_text(self) -> str:
        """A text that is equal on ranks with equal settings."""
        named = [
            f"{lower}-{upper}:{value.activations}/{value.gradients}"
            for (lower, upper), value in sorted(self.by_link.items())
        ]
        return f"format {_FORMAT}, {', '.join(named)}" if named else "none"


def packs(scheme: Scheme, spec: TensorSpec) -> bool:
    """Whether a tensor of ``spec``, or its gradient, is packed."""
    return spec.requires_grad and spec.dtype in _PACKED[scheme]


def wire_bytes(scheme: Scheme, spec: TensorSpec, shape: Sequence[int] | None = None) -> int:
    """Bytes of a tensor of ``spec`` on the wire, or of a part of it that has ``shape``."""
    elements = math.prod(spec.shape if shape is None else shape)
    if not packs(scheme, spec):
        return elements * spec.dtype.itemsize
    return 2 * elements if scheme == "bf16" else elements + 2 * math.ceil(elements / _BLOCK)


def pack(scheme: Scheme, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor``, in the order of a contiguous one: uint8 of ``wire_bytes``."""
    tensor = tensor.detach()
    if scheme == "8bit":
        return pack_8bit(tensor)
    rounded = tensor.to(torch.bfloat16, memory_format=torch.contiguous_format)
    return rounded.view(-1).view(torch.uint8)


def unpack(scheme: Scheme, packed: torch.Tensor, target: torch.Tensor) -> None:
    """Unpack into ``target``, which may have any strides."""
    if scheme == "bf16":
        target.copy_(packed.view(torch.bfloat16).view(target.shape))
    elif target.is_contiguous():
        unpack_8bit(packed, target)
    else:
        whole = torch.empty_like(target, memory_format=torch.contiguous_format)
        unpack_8bit(packed, whole)
        target.copy_(whole)


def _check_scheme(scheme: Scheme) -> None:
    if scheme not in get_args(Scheme):
        raise ValueError(
            f"compression must be 'none', 'bf16' or '8bit', or a dict by link such as "
            f"{{(0, 1): ldt.Compression(activations='8bit', gradients='bf16')}}, got {scheme!r}"
        )
