"""How much longer does a step take if its shapes are new, over an emulated link between the edge and the cloud?

    python benchmarks/new_shapes.py --stages 8 --latency 20ms

Chunks are tiny, so that a step takes little more than its messages. In calls of

- ``known``      all steps have one shape
- ``new``        each step has a shape that no step had before
- ``announced``  likewise, and each step is announced by the one before (``upcoming=``)

Times are medians in ms per step, on the edge. Without latency ``new`` takes longer by the dry runs of all chunks, one
after the other; the column ``link`` is what it takes longer beyond that.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from harness import Report, column, in_ranks, parse, parser
from picture import Picture
from wan_link import Settings, wide_area_link

import ldt
from ldt.cli.units import seconds
from ldt.testing import toy_chunks, toy_loss, unsplit_step
from ldt.topology import Topology

WIDTH, RATE, NO_LATENCY, WARM_UP = 4, 125e6, 5e-5, 3
CALLS = ("known", "new", "announced")
Batch = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ShapesRow:
    """One kind of calls over one link."""

    PICTURE: ClassVar[Picture] = Picture("calls", ("milliseconds",), ("latency",))
    latency: float = column("one way ms", ">10.2f")
    calls: str = column("calls", "<10")
    milliseconds: float = column("ms", ">8.1f")
    longer: float = column("longer ms", ">10.1f")
    link: float = column("link ms", ">8.1f")
    wrong: int = column("#wrong", ">7")


def batch_of(rows: int) -> Batch:
    return [(torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)) for _ in range(2)]


def measure(stages: int, laps: int, count: int) -> dict[str, float]:
    """Return the median time of a step of each kind of calls, on the edge, and how many losses were ``wrong``."""
    topology = Topology([1] * stages, laps=laps)
    chunks = toy_chunks(topology, width=WIDTH)
    with ldt.connect(topology) as mesh:
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)

        wrong = 0

        def differing(batch: Batch, losses: list[torch.Tensor]) -> int:
            expected, _ = unsplit_step(chunks, batch, toy_loss)
            return sum(not torch.equal(*pair) for pair in zip(losses, expected, strict=True))

        def median(batches: list[Batch], announce: bool = False) -> float:
            nonlocal wrong
            times, steps = [], []
            for number, batch in enumerate(batches[: count + WARM_UP]):
                start = time.perf_counter()
                upcoming = batches[number + 1] if announce and number + 1 < len(batches) else None
                result = pipeline.step(
                    batch if mesh.is_edge else None, upcoming=upcoming if mesh.is_edge else None
                )
                times.append(time.perf_counter() - start)
                steps.append((batch, result.losses))
            wrong += sum(map(differing, *zip(*steps, strict=True))) if mesh.is_edge else 0
            return statistics.median(times[WARM_UP:])

        shapes = range(count + WARM_UP)
        known = median([batch_of(3)] * len(shapes))
        new = median([batch_of(4 + number) for number in shapes])
        announced = median([batch_of(50 + number) for number in shapes], announce=True)
        return {"known": known, "new": new, "announced": announced, "wrong": wrong}


def rows_of(found: Callable[[float], dict[str, float]], latency: float) -> Iterator[ShapesRow]:
    """Yield the rows of the control, then those of the link."""
    excess: dict[str, float] = {}
    for one in (NO_LATENCY, latency):
        times = found(one)
        for calls in CALLS:
            longer = times[calls] - times["known"]
            link = longer - excess.setdefault(calls, longer)
            yield ShapesRow(
                one * 1e3, calls, times[calls] * 1e3, longer * 1e3, link * 1e3, int(times["wrong"])
            )


def main() -> int:
    options = parser(__doc__ or "", transports=False)
    options.add_argument("--stages", type=int, default=8, help="ranks, of which one is on the edge")
    options.add_argument("--laps", type=int, default=1)
    options.add_argument("--latency", type=seconds, default=20e-3, help="one way")
    options.add_argument("--steps", type=int, default=20, help="steps of each kind")
    arguments = parse(options, lambda given: int(given.stages))

    def found(latency: float) -> dict[str, float]:
        with wide_area_link(Settings(RATE, latency)) as link:
            places = [link.places[0], *[link.places[1]] * (arguments.stages - 1)]
            inputs: list[Any] = [arguments.stages, arguments.laps, arguments.steps]
            times: dict[str, float] = in_ranks(measure, inputs, arguments.stages, places)
        return times

    report = Report(arguments, f"stages {arguments.stages}, laps {arguments.laps}, {RATE * 8e-9:g} Gb/s")
    for row in rows_of(found, arguments.latency):
        report.add(row)
    report.write()
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
