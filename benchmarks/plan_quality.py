"""How good are the planner's orders? Makespan over the lower bound, against the fixed order, by link and memory.

All times are simulated, so the table is the same on every machine; only ``--growth`` measures time. A forward of a
cloud chunk takes 1 and its backward 2; chunks on the edge take ``edge`` times that; ``latency`` is one way. Every
number except the bubble is a makespan divided by ``ldt.plan.lower_bound``. torch is not needed.

    python benchmarks/plan_quality.py                      the table
    python benchmarks/plan_quality.py --memory             also under memory limits, in terms of ushape's own peak
    python benchmarks/plan_quality.py --shared             an edge that serves several cloud replicas, instead
    python benchmarks/plan_quality.py --pipe               all that crosses shares a pipe, instead
    python benchmarks/plan_quality.py --growth growth.png  planning time by size, as a plot
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ldt.plan import Costs, Timeline, lower_bound, optimize, simulate, ushape
from ldt.topology import Node, Topology

STAGES = (2, 3, 4, 8)
EDGES = (0.25, 0.5)
LATENCIES = (0.0, 0.5, 1.0, 2.0, 4.0)
MEMORY = (1.0, 1.5, 2.0)  # times ushape's peak on each stage


class Setting(NamedTuple):
    """One row of the table."""

    laps: int
    microbatches: int  # per edge replica
    stages: int
    edge: float
    latency: float
    served: int = 1  # cloud replicas per edge replica
    pipe: float = 0.0  # work of each pipe between edge and cloud, as a share of that of a cloud stage
    edges: int = 1  # edge replicas

    @property
    def topology(self) -> Topology:
        dp = self.served * self.edges
        return Topology([1] * self.stages, dp=dp, edge_dp=self.edges, laps=self.laps)

    @property
    def costs(self) -> Costs:
        topology = self.topology
        shares = [self.edge if topology.stage_of(c) == 0 else 1.0 for c in range(topology.num_chunks)]
        size = self.pipe * 3 / (2 * self.served * self.edges)  # of each activation and gradient
        crosses = [0 in (topology.stage_of(hop), topology.stage_of(hop + 1)) for hop in range(topology.tail)]
        return Costs(
            [1 * s for s in shares],
            [2 * s for s in shares],
            latency=self.latency,
            bandwidth=1.0,
            bytes=[size * cross for cross in crosses],
        )


@dataclass(frozen=True)
class Row:
    """Ratios to the bound, and the peak of live activations on any node."""

    setting: Setting
    ushape: float
    optimize: float
    split: float
    ushape_peak: int
    optimize_peak: int


def settings(laps: int, microbatches: int) -> Iterator[Setting]:
    """Yield the forty settings of the table."""
    for stages, edge, latency in itertools.product(STAGES, EDGES, LATENCIES):
        yield Setting(laps, microbatches, stages, edge, latency)


def shared_settings(laps: int = 1, microbatches: int = 32) -> Iterator[Setting]:
    """Yield settings in which the edge and its cloud replicas, with ``microbatches`` each, have equal work."""
    for stages, served, latency in itertools.product((3, 4), (2, 4), (0.0, 1.0, 4.0)):
        yield Setting(laps, microbatches * served, stages, 0.5 / served, latency, served)


def pipe_settings(microbatches: int = 32) -> Iterator[Setting]:
    """Settings in which each pipe has half of the work of a cloud stage, as much, or twice that."""
    for stages, served, pipe, latency in itertools.product((2, 3, 4), (1, 2), (0.5, 1.0, 2.0), (0.0, 2.0)):
        if served == 1 or stages == 3:
            yield Setting(1, microbatches * served, stages, 0.5 / served, latency, served, pipe)


def meeting_settings(microbatches: int = 32) -> Iterator[Setting]:
    """Settings in which the flows of two laps, or of two edge replicas, meet on pipes as busy as a cloud stage."""
    for stages, latency in itertools.product((2, 3), (0.0, 2.0)):
        yield Setting(2, microbatches, stages, 0.5, latency, pipe=1.0)
    for served, latency in itertools.product((1, 2), (0.0, 2.0)):
        yield Setting(1, microbatches * served, 3, 0.5 / served, latency, served, 1.0, edges=2)


def fixed(setting: Setting) -> Timeline:
    """Simulate the fixed order."""
    return simulate(ushape(setting.topology, setting.microbatches), setting.costs)


def planned(
    setting: Setting, memory_limit: list[int] | None = None, split_backward: bool = False
) -> Timeline:
    """Simulate the planned order."""
    topology, costs = setting.topology, setting.costs
    plan = optimize(
        topology, setting.microbatches, costs, memory_limit=memory_limit, split_backward=split_backward
    )
    return simulate(plan, costs)


def bound(setting: Setting, split_backward: bool = False) -> float:
    return lower_bound(setting.topology, setting.microbatches, setting.costs, split_backward=split_backward)


def row(setting: Setting) -> Row:
    """Return one line of the table."""
    order, plan, split = fixed(setting), planned(setting), planned(setting, split_backward=True)
    return Row(
        setting,
        order.makespan / bound(setting),
        plan.makespan / bound(setting),
        split.makespan / bound(setting, split_backward=True),
        max(order.peak_live.values()),
        max(plan.peak_live.values()),
    )


def limited(setting: Setting, times: float) -> float:
    """Return the ratio to the bound with each stage's memory limited to ``times`` the fixed order's peak there."""
    peaks = fixed(setting).peak_live.values()
    return planned(setting, [math.floor(times * peak) for peak in peaks]).makespan / bound(setting)


def growth() -> Iterator[tuple[int, int, float]]:
    """Yield stages, microbatches, and the seconds to plan one lap."""
    for stages, microbatches in ((2, 32), (4, 32), (8, 64), (16, 128), (32, 256), (32, 512), (64, 1024)):
        setting = Setting(1, microbatches, stages, 0.5, 1.0)
        start = time.perf_counter()
        optimize(setting.topology, microbatches, setting.costs)
        yield stages, microbatches, time.perf_counter() - start


def print_table(laps: int, microbatches: int, memory: bool) -> None:
    limits = MEMORY if memory else ()
    head = ["P", "edge", "latency", "ushape", "optimize", "split", "peak_u", "peak_o"]
    head += [f"mem x{times:g}" for times in limits]
    print(f"# laps={laps} microbatches={microbatches}")
    print("  ".join(f"{name:>8}" for name in head))
    columns: list[list[float]] = []
    for setting in settings(laps, microbatches):
        line = row(setting)
        columns.append(
            [line.ushape, line.optimize, line.split, line.ushape_peak, line.optimize_peak]
            + [limited(setting, times) for times in limits]
        )
        cells = [f"{setting.stages:>8}", f"{setting.edge:>8}", f"{setting.latency:>8}"]
        print("  ".join(cells + [_cell(number) for number in columns[-1]]))
    for name, function in (("max", max), ("mean", statistics.fmean)):
        print(f"{name:>28}  " + "  ".join(_cell(function(column)) for column in zip(*columns, strict=True)))


def print_shared_table(laps: int) -> None:
    print(f"# laps={laps} microbatches=32 per cloud replica, edge=0.5/served, peaks of the edge")
    head = ["P", "served", "latency", "ushape", "optimize", "peak_u", "peak_o"]
    print("  ".join(f"{name:>8}" for name in head))
    edge = Node(0, 0)
    for setting in shared_settings(laps):
        order, plan, least = fixed(setting), planned(setting), bound(setting)
        cells = [f"{setting.stages:>8}", f"{setting.served:>8}", f"{setting.latency:>8}"]
        numbers = [order.makespan / least, plan.makespan / least, order.peak_live[edge], plan.peak_live[edge]]
        print("  ".join(cells + [_cell(number) for number in numbers]))


def print_pipe_table() -> None:
    print("# microbatches=32 per cloud replica, edge=0.5/served")
    head = ("P", "laps", "edges", "served", "pipe", "latency", "ushape", "optimize", "peak_o")
    print("  ".join(f"{name:>8}" for name in head))
    for setting in (*pipe_settings(), *meeting_settings()):
        plan, least = planned(setting), bound(setting)
        sizes = (setting.stages, setting.laps, setting.edges, setting.served, setting.pipe, setting.latency)
        cells = [f"{n:>8}" for n in sizes]
        numbers = [fixed(setting).makespan / least, plan.makespan / least, max(plan.peak_live.values())]
        print("  ".join(cells + [_cell(number) for number in numbers]), flush=True)


def _cell(number: float) -> str:
    return f"{number:>8}" if isinstance(number, int) else f"{number:>8.3f}"


def draw_growth(path: Path) -> None:
    from matplotlib.figure import Figure  # needed for this option only

    points = list(growth())
    actions = [2 * (stages + 1) * microbatches for stages, microbatches, _ in points]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(actions, [seconds for _, _, seconds in points], "o-")
    for (stages, microbatches, seconds), count in zip(points, actions, strict=True):
        print(f"P={stages:<3} M={microbatches:<5} {count:>7} compute actions  {seconds:8.3f} s")
        axes.annotate(f"{stages} × {microbatches}", (count, seconds), fontsize=8)
    axes.set(xlabel="compute actions (P × M beside the points)", ylabel="seconds to plan", title="optimize")
    figure.savefig(path)


def main() -> None:
    options = argparse.ArgumentParser(description="Quality of planned orders, simulated")
    options.add_argument("--memory", action="store_true", help="also plan under memory limits")
    options.add_argument("--shared", action="store_true", help="an edge that serves several replicas instead")
    options.add_argument("--pipe", action="store_true", help="all that crosses shares a pipe, instead")
    options.add_argument("--laps", type=int, nargs="+", default=[1, 2])
    options.add_argument("--microbatches", type=int, nargs="+", default=[32, 8])
    options.add_argument("--growth", type=Path, metavar="PICTURE", help="time to plan by size instead")
    arguments = options.parse_args()
    if arguments.growth:
        draw_growth(arguments.growth)
        return
    if arguments.shared:
        for laps in arguments.laps:
            print_shared_table(laps)
        return
    if arguments.pipe:
        print_pipe_table()
        return
    for laps, microbatches in itertools.product(arguments.laps, arguments.microbatches):
        print_table(laps, microbatches, arguments.memory)


if __name__ == "__main__":
    main()
