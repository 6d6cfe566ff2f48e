"""Over a wide-area link with real TCP: how long does a step take, against its simulation and torch's runtime?

Two network namespaces and an emulated link between them (``wan_link.py``): a rate, a latency, a drop-tail queue and
loss, shared by all that crosses. The edge is in one namespace, all other stages in the other. Paths:

- ``raw TCP``         the bytes of a step, both ways at once, over plain connections: what the link can do
- ``torch ...``       the orders below in torch.distributed.pipelining's own runtime
- ``ldt ushape``      the fixed order
- ``ldt optimize``    the order planned for this link

Where packets are lost, planned orders have room for those that are sent again. ``--outage`` cuts the link in each
counted step, 0.2 s after its beginning; ``--blocked`` drops what opens a connection from that end, as a firewall does.
With ``--compression`` the messages of the last two are packed, and simulated with the bytes that cross.

Each cell is a fresh launch: link, processes and connections; its first steps are left out. Each link comes after a
control of the same rate without latency or loss, on which the same plan runs: what it takes there beyond its own
simulation is this machine's doing. ``over`` is measured / (simulated + that). Compute is a sleep. ``up`` and ``down``
are the bytes of a step as counted on the link. ``load`` is that of the machine when the cell began. Gradients of the
last step are compared with the unsplit model's. With ``--device cuda`` chunks of ldt compute on GPUs, which ranks share
if there are too few (two processes compute at once only under CUDA's MPS), over transport host. Without root,
/dev/net/tun, pyroute2 or a C compiler it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from harness import Report, column, in_ranks, parser
from picture import Picture
from wan_link import Link, Settings, check_wan, wide_area_link
from wan_paths import Job, Measured, ldt_steps, raw_tcp, torch_steps

import ldt
from ldt.cli.compressed_costs import SHARES, compressed
from ldt.cli.units import bandwidth, nbytes, one_or_more, seconds
from ldt.plan import Costs, optimize, simulate, ushape

CONTROL_DELAY = 50e-6
LOOPBACK = 1e12  # bytes per second, in place of a rate
ENDS = ("edge", "cloud")
# Round trips that a lost packet costs: a quarter until TCP notices (RFC 8985), and one for another copy.
SENT_AGAIN = 1.25
RUNS: dict[str, Callable[[Job, Link], Measured]] = {"raw": raw_tcp, "torch": torch_steps, "ldt": ldt_steps}
# Which of the requested numbers of connections a path can have; 0 is one for each process group.
COUNTS: dict[str, Callable[[list[int | str]], list[int | str]]] = {
    "raw": lambda counts: [count for count in counts if count not in (0, "auto")] or [1],
    "torch": lambda _: [0],
    "ldt": lambda counts: counts,
}
PATHS = ["raw TCP", "torch ushape", "torch optimize", "ldt ushape", "ldt optimize"]


@dataclass(frozen=True)
class WanRow:
    """One path over one link."""

    PICTURE: ClassVar[Picture] = Picture("path", ("measured", "simulated"), ("link",))
    link: str = column("link", "<44")
    path: str = column("path", "<16")
    connections: int | str = column("conn.", ">5")
    simulated: float | None = column("simulated ms", ">12.0f")
    measured: float = column("measured ms", ">11.0f")
    least: float = column("least", ">6.0f")
    most: float = column("most", ">6.0f")
    over: float | None = column("over", ">5.2f")
    up: float = column("up MB", ">6.1f")
    down: float = column("down MB", ">7.1f")
    load: float = column("load", ">5.1f")
    wrong: int = column("#wrong", ">7")


@dataclass(frozen=True)
class Cell:
    """A path over a link, and what its simulation takes. The link's directions are up and down."""

    path: str
    job: Job
    up: Settings
    down: Settings
    simulated: float | None
    blocked: str | None = None

    def measure(self, congestion: str) -> tuple[Measured, float]:
        """Also returns the load of the machine before."""
        load = os.getloadavg()[0]
        with wide_area_link(self.up, self.down, congestion) as link:
            if self.blocked:
                link.set(ENDS.index(self.blocked), no_syn=1)
            places = [link.places[0], *[link.places[1]] * (len(self.job.topology.tp) - 1)]
            run = RUNS[self.path.split()[0]]
            measured: Measured = in_ranks(run, (self.job, link), len(places), places)
        return measured, load


def rows(given: argparse.Namespace) -> Iterator[WanRow]:
    """Control and link take turns for each path."""
    for loss in given.loss:
        for latency in given.latency:
            up = Settings(given.rate, latency, loss, given.queue)
            down = replace(up, rate=given.rate_down or given.rate)
            quiet = [replace(side, delay=CONTROL_DELAY, loss=0.0, queue=None) for side in (up, down)]
            for path, job in jobs_of(given, up):
                excess = None
                for sides in (quiet, [up, down]):
                    simulated = None
                    if not path.startswith("raw"):
                        costs = costs_of(given, sides[0], job.compression)
                        simulated = simulate(job.plan, costs).makespan
                    cell = Cell(path, job, sides[0], sides[1], simulated)
                    if sides is not quiet:
                        outage = replace(job, outage=given.outage)
                        cell = replace(cell, job=outage, blocked=given.blocked)
                    measured, load = cell.measure(given.congestion)
                    row = row_of(cell, measured, load, excess)
                    if simulated is not None and excess is None:
                        excess = max(0.0, row.measured / 1e3 - simulated)
                    yield row


def costs_of(given: argparse.Namespace, side: Settings, compression: str = "none") -> Costs:
    """Of the job over a link of that latency and loss. Nothing but the link takes time between stages."""
    topology = ldt.Topology([1] * given.stages)
    hops = range(topology.tail)
    crosses = [not topology.is_local(topology.channel(hop, "F", 0)) for hop in hops]
    up, down = given.rate, given.rate_down or given.rate
    costs = Costs(
        forward=given.forward,
        backward=[2 * value for value in given.forward],
        latency=[side.delay if crossing else 0.0 for crossing in crosses],
        jitter=[2 * SENT_AGAIN * side.delay if crossing and side.loss else 0.0 for crossing in crosses],
        bandwidth={
            way: [rate if crossing else LOOPBACK for crossing in crosses]
            for way, rate in {"up": up, "down": down}.items()
        },
        bytes=given.bytes,
    )
    return costs if compression == "none" else compressed(costs, topology, compression, "float32")


def jobs_of(given: argparse.Namespace, side: Settings) -> Iterator[tuple[str, Job]]:
    """Each path with its job for a link of that latency and loss."""
    topology = ldt.Topology([1] * given.stages)
    fixed = ushape(topology, given.microbatches)
    for path in given.paths:
        runtime, order = path.split()
        compression = given.compression if runtime == "ldt" else "none"
        plan = fixed
        if order == "optimize":
            plan = optimize(topology, given.microbatches, costs_of(given, side, compression))
        for connections in COUNTS[runtime](given.connections):
            yield (
                path,
                Job(
                    topology,
                    plan,
                    given.forward,
                    given.bytes,
                    given.steps,
                    given.warm_up,
                    connections,
                    compression,
                    device=given.device if runtime == "ldt" else "cpu",
                ),
            )


def row_of(cell: Cell, measured: Measured, load: float, excess: float | None) -> WanRow:
    median = statistics.median(measured.seconds)
    over = None
    if cell.simulated is not None and excess is not None:
        over = median / (cell.simulated + excess)
    return WanRow(
        link=link_text(cell),
        path=cell.path,
        connections=cell.job.connections,
        simulated=None if cell.simulated is None else cell.simulated * 1e3,
        measured=median * 1e3,
        least=min(measured.seconds) * 1e3,
        most=max(measured.seconds) * 1e3,
        over=over,
        up=measured.up / 1e6,
        down=measured.down / 1e6,
        load=load,
        wrong=measured.wrong,
    )


def link_text(cell: Cell) -> str:
    up = cell.up
    rates = [f"{side.rate * 8e-6:g}" for side in (up, cell.down)]
    rate = rates[0] if rates[0] == rates[1] else "/".join(rates)
    text = f"{rate} Mb/s, {up.delay * 1e3:g} ms, queue {up.queue_bytes / 1e6:.1f} MB"
    text += f", {up.loss:.2%} loss" if up.loss else ""
    text += f", out for {cell.job.outage:g} s" if cell.job.outage else ""
    return text + (f", {cell.blocked} blocked" if cell.blocked else "")


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    options.add_argument("--rate", type=bandwidth, default=125e6, help="of the link, default 1Gbit")
    options.add_argument("--rate-down", type=bandwidth, help="to the edge; default: the same")
    options.add_argument("--latency", type=seconds, nargs="+", default=[0.02], help="one way: 20ms 50ms")
    options.add_argument(
        "--loss", type=float, nargs="+", default=[0.0], help="shares of packets, such as 0.001"
    )
    options.add_argument(
        "--queue", type=nbytes, help="default: one product of bandwidth and round trip, 1 MiB or more"
    )
    options.add_argument("--outage", type=seconds, default=0.0, help="of both directions in each step: 500ms")
    options.add_argument("--blocked", choices=ENDS, help="the end that cannot open connections")
    options.add_argument("--congestion", default="cubic", help="TCP's algorithm in both namespaces")
    options.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    options.add_argument(
        "--connections",
        type=lambda text: text if text == "auto" else int(text),
        nargs="+",
        default=[0, 4],
        help='between the sites, of raw TCP and ldt; 0: one for each process group; "auto": as ldt chooses',
    )
    options.add_argument("--compression", default="none", choices=["none", *SHARES], help="of ldt's messages")
    options.add_argument("--stages", type=int, default=3)
    options.add_argument("--microbatches", type=int, default=32)
    options.add_argument("--bytes", type=nbytes, default=1 << 20, help="of a message")
    options.add_argument(
        "--forward", type=one_or_more(seconds), default=[0.003, 0.012, 0.012, 0.003], help="of the chunks"
    )
    options.add_argument("--steps", type=int, default=5, help="counted steps of each cell")
    options.add_argument("--warm-up", type=int, default=2, help="steps of each cell before them")
    given = options.parse_args()
    if not isinstance(given.forward, list):
        given.forward = [given.forward] * (given.stages + 1)
    if len(given.forward) != given.stages + 1:
        options.error(
            f"--forward: expected a time for each of {given.stages + 1} chunks, got {len(given.forward)}"
        )
    given.device, given.link, given.ranks = given.device or "cpu", None, given.stages
    try:
        check_wan()
    except ValueError as error:
        print(f"# skipped: {error}")
        sys.exit(0)
    context = (
        f"{given.stages} stages, {given.microbatches} microbatches, messages of {given.bytes / 2**20:g} MiB, "
        f"{given.congestion}, compression {given.compression}"
    )
    report = Report(given, context)
    for row in rows(given):
        report.add(row)
    report.write()
    sys.exit(1 if report.wrong else 0)
