"""Pictures of the U: where layers are, the chunks of one and two laps, and when they run."""

from __future__ import annotations

from svg import BLUE, CLOUD, EDGE, GREEN, GREY, ORANGE, PLAIN, Drawing

from ldt.plan import Costs, Event, Kind, simulate, ushape
from ldt.topology import Node, Topology

_NAMES = ("edge", "cloud 1", "cloud 2")


def the_u() -> str:
    """The path of a microbatch through edge and cloud."""
    d = Drawing(880, 310, "A U-shaped pipeline")
    d.sites(222, (20, 300, "edge: stage 0, your site"), (500, 360, "cloud: stages 1 to P-1, rented"))
    d.label(410, 24, "slow link", colour=ORANGE, bold=True)
    for x in (340, 480):
        d.line([(x, 44), (x, 266)], ORANGE, dashed=True)
    for y, ends, layers in ((70, "samples", "first layers"), (200, "labels, loss", "last layers")):
        d.named_box(40, y, 100, 40, ends, PLAIN, GREY)
        d.named_box(190, y, 110, 40, layers, "#ffffff", BLUE)
    d.named_box(520, 70, 130, 40, "layers", "#ffffff", GREEN)
    d.named_box(710, 70, 130, 40, "layers", "#ffffff", GREEN)
    d.label(585, 128, "stage 1", colour=GREY, size=12)
    d.label(760, 128, "stage 2", colour=GREY, size=12)
    d.arrow([(140, 84), (188, 84)], BLUE)
    d.arrow([(300, 84), (518, 84)], BLUE)
    d.arrow([(650, 84), (708, 84)], BLUE)
    d.arrow([(800, 110), (800, 214), (302, 214)], BLUE)
    d.arrow([(190, 214), (142, 214)], BLUE)
    d.arrow([(140, 230), (188, 230)], GREEN, dashed=True)
    d.arrow([(300, 230), (816, 230), (816, 112)], GREEN, dashed=True)
    d.arrow([(710, 98), (652, 98)], GREEN, dashed=True)
    d.arrow([(520, 98), (302, 98)], GREEN, dashed=True)
    d.line([(300, 290), (340, 290)], BLUE, width=2)
    d.label(348, 290, "activations", anchor="start", size=13)
    d.line([(450, 290), (490, 290)], GREEN, width=2, dashed=True)
    d.label(498, 290, "gradients", anchor="start", size=13)
    return d.text


def laps() -> str:
    """Which stage has which chunk, for one lap and for two."""
    d = Drawing(880, 240, "Chunks of one and two laps over three stages")
    _lap_grid(d, 90, Topology(tp=[1, 1, 1]), "one lap: 4 chunks")
    _lap_grid(d, 400, Topology(tp=[1, 1, 1], laps=2), "two laps: 7 chunks")
    for stage, name in enumerate(_NAMES):
        d.label(20, 78 + 60 * stage, name, anchor="start", bold=True)
    return d.text


def _lap_grid(d: Drawing, left: float, topology: Topology, title: str) -> None:
    pitch = 66
    width = pitch * topology.num_chunks
    d.label(left + width / 2, 28, title, bold=True)
    for stage in range(topology.num_stages):
        d.box(left, 54 + 60 * stage, width, 48, EDGE if stage == 0 else CLOUD)
    for chunk in range(topology.num_chunks):
        x, y = left + pitch * chunk, 78 + 60 * topology.stage_of(chunk)
        d.named_box(
            x + 8, y - 16, 42, 32, str(chunk), "#ffffff", BLUE if topology.stage_of(chunk) == 0 else GREEN
        )
        if chunk < topology.tail:
            d.arrow([(x + 50, y), (x + pitch + 6, 78 + 60 * topology.stage_of(chunk + 1))], GREY, width=1.5)


def timeline() -> str:
    """One step of the fixed order, simulated."""
    topology = Topology(tp=[1, 1, 1])
    run = simulate(ushape(topology, 4), Costs(forward=[1, 2, 2, 1], backward=[2, 4, 4, 2], latency=1))
    d = Drawing(880, 220, "The U-shaped order of four microbatches over three stages")
    left, unit = 84, 780 / run.makespan

    def x(seconds: float) -> float:
        return left + unit * seconds

    for stage, name in enumerate(_NAMES):
        d.label(12, 46 + 56 * stage, name, anchor="start", bold=True)
        d.box(left, 28 + 56 * stage, 780, 36, PLAIN)
    for event in run.transfers:
        _message(d, event, x)
    for event in run.compute:
        y, colour = 28 + 56 * event.node.stage, BLUE if event.action.kind is Kind.F else GREEN
        d.box(x(event.start), y, unit * (event.end - event.start), 36, colour, "#ffffff")
        d.label(
            (x(event.start) + x(event.end)) / 2,
            y + 18,
            str(event.action.microbatch),
            colour="#ffffff",
            size=12,
        )
    d.box(300, 194, 14, 12, BLUE)
    d.label(320, 200, "forward", anchor="start", size=13)
    d.box(390, 194, 14, 12, GREEN)
    d.label(410, 200, "backward", anchor="start", size=13)
    d.line([(490, 200), (520, 200)], ORANGE, width=1.5)
    d.label(528, 200, "message", anchor="start", size=13)
    return d.text


def _message(d: Drawing, event: Event, x: object) -> None:
    """Draw a line from the middle of the sender's row to that of the receiver's, where there is no bar."""
    assert callable(x)
    assert event.channel is not None
    ends = [(event.node, event.start), (event.channel.target, event.end)]
    d.line([(x(seconds), _middle(node)) for node, seconds in ends], ORANGE, width=1.5)


def _middle(node: Node) -> float:
    return 46 + 56 * node.stage
