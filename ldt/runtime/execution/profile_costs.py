"""Measures ``ldt.plan.Costs`` for the planner by running a few steps and probing the links."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, tee
from typing import Any

import torch

from ldt.plan import Costs, Kind
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.execution.grad_reduce import EarlierGradients
from ldt.runtime.execution.step_result import StepStats
from ldt.runtime.mesh.link_probe import LinkFigures, probe_links
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.call import all_agree

__all__ = ["measure_costs"]

_CALL = "measure_costs()"
_WITHIN_A_NODE = LinkFigures(latency=0.0, jitter=0.0, up=1e18, down=1e18)


def measure_costs(
    mesh: Mesh,
    step: Callable[[Any], StepStats],
    microbatches: Any,
    repeats: int,
    parameters: Iterable[torch.nn.Parameter],
) -> Costs:
    """Return the costs of ``step(microbatches)``, equal on every rank. A collective call of all ranks.

    Runs one warm-up step, then ``repeats`` more. Times are medians over microbatches and steps, of the slowest rank
    that runs the chunk. Bytes are the mean of a hop's messages in each direction. Gradients are restored.
    """
    all_agree(mesh, _CALL, _refusal(repeats), {"numbers of steps": str(repeats)})
    once = isinstance(microbatches, Iterator)  # its errors must be raised within a step
    batches = iter(tee(microbatches, repeats + 1)) if once else repeat(microbatches)
    earlier = EarlierGradients(parameters)
    try:
        stats = [step(next(batches)) for _ in range(repeats + 1)][1:]
    finally:
        earlier.restore()
    with mesh.collective(_CALL):
        figures = mesh.control.all_gather([_times(stats), _sizes(mesh, stats[-1])], _read_figures)
        times, sizes = map(_largest, zip(*figures, strict=True))
        hops = range(mesh.topology.tail)
        bytes_by_hop = {way: [sizes.get(f"{way}{hop}", 0) for hop in hops] for way in "FB"}
        links = probe_links(mesh, dict(zip(hops, map(max, *bytes_by_hop.values()), strict=True)))
    figures_by_hop = [links.get(hop, _WITHIN_A_NODE) for hop in hops]
    return Costs(
        **_by_chunk(times, range(mesh.topology.num_chunks)),
        latency=[link.latency for link in figures_by_hop],
        jitter=[link.jitter for link in figures_by_hop],
        bandwidth={
            "up": [link.up for link in figures_by_hop],
            "down": [link.down for link in figures_by_hop],
        },
        bytes={"forward": bytes_by_hop["F"], "backward": bytes_by_hop["B"]},
    )


def _refusal(repeats: int) -> ValueError | None:
    if isinstance(repeats, int) and not isinstance(repeats, bool) and repeats >= 1:
        return None
    return InputValueError(f"steps must be a number from 1 on, got {repeats!r}")


def _read_figures(value: Any) -> tuple[dict[str, float], dict[str, int]]:
    """Parse ``_times`` and ``_sizes`` of one rank."""
    times, sizes = value
    return (
        {str(key): float(seconds) for key, seconds in times.items()},
        {str(hop): int(size) for hop, size in sizes.items()},
    )


def _largest(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest figure of all ranks, by name."""
    names = {name for found in figures for name in found}
    return {name: max(found[name] for found in figures if name in found) for name in names}


def _times(stats: Sequence[StepStats]) -> dict[str, float]:
    """Median seconds by kind and chunk, as "F2"."""
    found = defaultdict(list)
    for entry in (entry for step in stats for entry in step.entries if entry.action.kind.is_compute):
        found[f"{entry.action.kind}{entry.action.chunk}"].append(entry.end - entry.start - entry.waited)
    return {key: statistics.median(times) for key, times in found.items()}


def _sizes(mesh: Mesh, stats: StepStats) -> dict[str, int]:
    """Bytes of a message by direction and hop, as "F2", for the channels on which this rank sends or receives."""
    traffic = ((channel, stats.channels.get(channel.name)) for channel in mesh.topology.channels)
    return {
        f"{channel.direction}{channel.hop}": counts.bytes // counts.messages
        for channel, counts in traffic
        if counts is not None
    }


def _by_chunk(slowest: dict[str, float], chunks: Iterable[int]) -> dict[str, list[float]]:
    """The per-chunk figures of ``Costs``, with those of a split backward if the plan has one."""

    def seconds(kind: Kind, chunk: int, default: float) -> float:
        return slowest.get(f"{kind}{chunk}", default)

    parts = [[seconds(kind, chunk, 0.0) for chunk in chunks] for kind in (Kind.I, Kind.W)]
    backward = [seconds(Kind.B, chunk, sum(part)) for chunk, *part in zip(chunks, *parts, strict=True)]
    figures = {"forward": [seconds(Kind.F, chunk, 0.0) for chunk in chunks], "backward": backward}
    if any(map(any, parts)):
        figures["input"], figures["weight"] = (
            [seconds(kind, chunk, whole / 2) for chunk, whole in zip(chunks, backward, strict=True)]
            for kind in (Kind.I, Kind.W)
        )
    return figures
