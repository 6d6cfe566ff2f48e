"""Messages that wait for their send: tensors as they are, or packed for a link with compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ldt.runtime.comm.compression import Scheme, packs, wire_bytes
from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.runtime.comm.packed_message import pack_message
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.common.tensor_spec import TensorSpec

__all__ = ["Outgoing", "message_bytes"]


@dataclass
class Outgoing:
    """A message of ``specs``. Of what is packed in ``parts``, ``tensors`` has the shapes alone."""

    tensors: list[torch.Tensor]
    specs: Sequence[TensorSpec]
    scheme: Scheme = "none"
    parts: Parts | None = None

    @classmethod
    def of(
        cls, endpoint: Endpoint | None, tensors: list[torch.Tensor], specs: Sequence[TensorSpec]
    ) -> Outgoing:
        """Pack ``tensors`` as ``endpoint`` says; a rank without one sends nothing. Does not wait for a device."""
        scheme = "none" if endpoint is None else endpoint.scheme
        if endpoint is None or not any(packs(scheme, spec) for spec in specs):
            return cls(tensors, specs)
        parts = pack_message(endpoint, _in_memory_order(tensors, specs), specs)
        shapes = [
            tensor.to("meta") if packs(scheme, spec) else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        return cls(shapes, specs, scheme, parts)

    @property
    def in_flight(self) -> list[torch.Tensor | None]:
        """The tensors whose own memory is sent; None for those that are packed."""
        return [None if tensor.is_meta else tensor for tensor in self.tensors]

    @property
    def schemes(self) -> list[Scheme]:
        """How each tensor crosses."""
        return [self.scheme if packs(self.scheme, spec) else "none" for spec in self.specs]

    def send(self, endpoint: Endpoint, label: str) -> CompositeWork | None:
        """Start sending this rank's part. Returns None if it has none."""
        if self.parts is not None:
            return endpoint.send_parts(self.parts, label)
        return endpoint.send(_in_memory_order(self.tensors, self.specs), label, self.specs)


def message_bytes(endpoint: Endpoint, specs: Sequence[TensorSpec]) -> int:
    """Bytes of a whole message on the wire."""
    return sum(wire_bytes(endpoint.scheme, spec) for spec in specs)


def _in_memory_order(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    return [spec.to_wire(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
