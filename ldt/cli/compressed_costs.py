"""The costs of a step whose messages between sites are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ldt.errors import LdtError
from ldt.plan import Costs
from ldt.topology import Topology

__all__ = ["SHARES", "compressed"]

Sizes = float | Sequence[float]
# By compression and dtype: the bytes on the wire over those of a tensor. Nothing packs what is not here.
SHARES = {
    "bf16": {"float32": 1 / 2},
    "8bit": {"float32": 130 / 512, "bfloat16": 130 / 256, "float16": 130 / 256},
}


def compressed(costs: Costs, topology: Topology, scheme: str, dtype: str) -> Costs:
    """``costs`` with the bytes of ``connect(compression=scheme)``, if all that crosses is packed and of ``dtype``.

    The time to pack is not included. Raises LdtError if the costs have no bytes or the scheme leaves ``dtype`` alone.
    """
    if dtype not in SHARES[scheme]:
        raise LdtError(f"--compression {scheme} packs {', '.join(SHARES[scheme])}, got --dtype {dtype}")
    if costs.bandwidth is None or not any(
        any(_by_hop(sizes, topology)) for sizes in _directions(costs.bytes)
    ):
        raise LdtError("--compression needs --bandwidth and --bytes, or a file of costs that has them")
    share = SHARES[scheme][dtype]
    if isinstance(costs.bytes, Mapping):
        packed = {way: _packed(sizes, topology, share) for way, sizes in costs.bytes.items()}
        return replace(costs, bytes=packed)
    return replace(costs, bytes=_packed(costs.bytes, topology, share))


def _directions(sizes: Sizes | Mapping[str, Sizes]) -> list[Sizes]:
    return list(sizes.values()) if isinstance(sizes, Mapping) else [sizes]


def _by_hop(sizes: Sizes, topology: Topology) -> list[float]:
    return list(sizes) if isinstance(sizes, Sequence) else [sizes] * topology.tail


def _packed(sizes: Sizes, topology: Topology, share: float) -> list[float]:
    """Per hop, those between two sites times ``share``."""
    return [
        size * share
        if topology.crosses(hop) and not topology.is_local(topology.channel(hop, "F", 0))
        else size
        for hop, size in enumerate(_by_hop(sizes, topology))
    ]
