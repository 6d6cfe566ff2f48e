"""Messages that wait for their send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ldt.runtime.comm.compression import packs, wire_bytes
from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.runtime.comm.packed_message import pack_message
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["Outgoing", "message_bytes"]


@dataclass
class Outgoing:
    """A message of ``specs``.

    Attributes:
        tensors: Its tensors; on the meta device those that are packed, whose memory may be freed.
        specs: Their specs.
        parts: What this rank sends of them.
    """

    tensors: list[torch.Tensor]
    specs: Sequence[TensorSpec]
    parts: Parts

    @classmethod
    def of(
        cls, endpoint: Endpoint | None, tensors: list[torch.Tensor], specs: Sequence[TensorSpec]
    ) -> Outgoing:
        """Pack ``tensors`` as ``endpoint`` says; a rank without one sends nothing. Does not wait for a device."""
        if endpoint is None:
            return cls(tensors, specs, {})
        parts = pack_message(endpoint, tensors, specs)
        kept = [
            tensor.to("meta") if packs(endpoint.scheme, spec) else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        return cls(kept, specs, parts)

    @property
    def in_flight(self) -> list[torch.Tensor | None]:
        """The tensors whose own memory is sent; None for those that are packed."""
        return [None if tensor.is_meta else tensor for tensor in self.tensors]


def message_bytes(endpoint: Endpoint, specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Bytes of a whole message on the wire, as if each tensor were packed in one part, and of its tensors."""
    sent = sum(wire_bytes(endpoint.scheme, spec) for spec in specs)
    return sent, sent if endpoint.scheme == "none" else sum(wire_bytes("none", spec) for spec in specs)
