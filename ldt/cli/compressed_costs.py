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


def compressed(costs: Costs, topology: Topology, scheme: str, dtype: str, pack: float = 0.0) -> Costs:
    """``costs`` of ``connect(compression=scheme)``, if all that crosses is packed and of ``dtype``.

    ``pack``: seconds for each byte of a tensor that is packed and unpacked, half of it at either end. Raises LdtError
    if the costs have no bytes or the scheme leaves ``dtype`` alone, PlanError if they do not fit the topology.
    """
    costs.check(topology)
    if dtype not in SHARES[scheme]:
        raise LdtError(f"--compression {scheme} packs {', '.join(SHARES[scheme])}, got --dtype {dtype}")
    hops = range(topology.tail)
    plain = {way: _listed(sizes, len(hops)) for way, sizes in _by_direction(costs.bytes).items()}
    if costs.bandwidth is None or not any(map(any, plain.values())):
        raise LdtError("--compression needs --bandwidth and --bytes, or a file of costs that has them")
    crosses = [topology.crosses(hop) and not topology.is_local(topology.channel(hop, "F", 0)) for hop in hops]
    share = SHARES[scheme][dtype]
    packed = {
        way: [size * share if crosses[hop] else size for hop, size in enumerate(sizes)]
        for way, sizes in plain.items()
    }
    if pack:
        costs = _with_seconds(
            costs, {way: _at_ends(sizes, crosses, pack / 2) for way, sizes in plain.items()}
        )
    return replace(costs, bytes=packed if isinstance(costs.bytes, Mapping) else packed["forward"])


def _at_ends(sizes: Sequence[float], crosses: Sequence[bool], seconds: float) -> list[float]:
    """By chunk, the ``seconds`` a byte of what crosses on the hops into it and out of it."""
    times = [size * seconds if crossing else 0.0 for size, crossing in zip(sizes, crosses, strict=True)]
    return [before + after for before, after in zip([0.0, *times], [*times, 0.0], strict=True)]


def _with_seconds(costs: Costs, extra: Mapping[str, Sequence[float]]) -> Costs:
    """``costs`` of chunks whose forward, and backward or I, take ``extra`` seconds longer, at speed 1."""

    def longer(figure: Sizes, way: str) -> list[float]:
        values = _listed(figure, len(extra[way]))
        return [value + seconds for value, seconds in zip(values, extra[way], strict=True)]

    whole = _listed(costs.backward, len(extra["backward"]))
    return replace(
        costs,
        forward=longer(costs.forward, "forward"),
        backward=longer(costs.backward, "backward"),
        weight=[value / 2 for value in whole] if costs.weight is None else costs.weight,
        input=None if costs.input is None else longer(costs.input, "backward"),
    )


def _by_direction(sizes: Sizes | Mapping[str, Sizes]) -> Mapping[str, Sizes]:
    return sizes if isinstance(sizes, Mapping) else {"forward": sizes, "backward": sizes}


def _listed(figure: Sizes, count: int) -> list[float]:
    return list(figure) if isinstance(figure, Sequence) else [figure] * count
