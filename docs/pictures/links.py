"""Pictures of the link between two stages: lanes, transfer modes, and what crosses."""

from __future__ import annotations

from svg import BLUE, CLOUD, EDGE, GREEN, GREY, ORANGE, PLAIN, Drawing

_CROSSES = (
    ("activations", "both", BLUE),
    ("gradients", "both", GREEN),
    ("shapes, masks, positions, token counts", "cloud", GREY),
    ("norms, overflows, heartbeats, failures", "both", GREY),
)
_STAYS = ("samples", "labels", "losses and outputs", "first and last layers", "texts of your errors")


def lanes() -> str:
    """Two dedicated lanes between an edge of one rank and a stage of two."""
    d = Drawing(880, 270, "Lanes between two stages")
    d.sites(190, (20, 190, "edge"), (620, 240, "stage 1: two ranks"))
    d.named_box(50, 114, 120, 50, "rank 0", "#ffffff", BLUE)
    d.named_box(650, 74, 120, 50, "rank 1, leader", "#ffffff", GREEN)
    d.named_box(720, 164, 120, 50, "rank 2", "#ffffff", GREEN)
    _lane(d, 84, "lane of activations 0 to 1", ("F2", "F1", "F0"), BLUE)
    _lane(d, 174, "lane of gradients 1 to 0", ("B0",), GREEN)
    d.arrow([(170, 130), (230, 100)], BLUE)
    d.arrow([(590, 100), (648, 100)], BLUE)
    d.arrow([(745, 124), (765, 162)], ORANGE)
    d.label(800, 143, "broadcast", colour=ORANGE, size=12)
    d.arrow([(670, 124), (592, 186)], GREEN)
    d.arrow([(232, 190), (170, 152)], GREEN)
    d.label(
        440, 252, "each lane: one stream, its own communicators, first in first out", colour=GREY, size=13
    )
    return d.text


def _lane(d: Drawing, y: float, name: str, messages: tuple[str, ...], colour: str) -> None:
    d.box(230, y, 360, 34, PLAIN, colour)
    d.label(410, y - 14, name, size=13)
    for index, message in enumerate(messages):
        d.named_box(330 + 70 * index, y + 5, 40, 24, message, "#ffffff", colour)


def transfers() -> str:
    """The paths of a message from a stage of two ranks to another."""
    d = Drawing(880, 250, "Ways of transfer: leader, scatter, direct")
    ways = (
        ("leader", "all, then broadcast", ((0, 0),), ("1", ""), True),
        ("scatter", "halves, then broadcast", ((0, 0), (1, 1)), ("1/2", "1/2"), True),
        ("direct", "what each rank has", ((0, 0), (1, 1)), ("own", "own"), False),
    )
    for index, (name, what, stripes, texts, broadcasts) in enumerate(ways):
        left = 20 + 290 * index
        d.label(left + 130, 24, name, bold=True)
        d.label(left + 130, 232, what, colour=GREY, size=13)
        d.box(left, 44, 70, 166, EDGE)
        d.box(left + 190, 44, 70, 166, CLOUD)
        for rank in range(2):
            y = 64 + 80 * rank
            d.named_box(left + 12, y, 46, 46, str(rank), "#ffffff", BLUE)
            d.named_box(left + 202, y, 46, 46, str(rank), "#ffffff", GREEN)
        for source, target in stripes:
            y = 87 + 80 * source
            d.arrow([(left + 58, y), (left + 200, 87 + 80 * target)], BLUE)
            d.label(left + 130, y - 12, texts[source], size=12)
        if broadcasts:
            d.arrow([(left + 220, 112), (left + 220, 142)], ORANGE)
        if broadcasts and len(stripes) == 2:
            d.arrow([(left + 232, 142), (left + 232, 112)], ORANGE)
    return d.text


def crossing() -> str:
    """What crosses the link, in which direction, and what stays on the edge."""
    d = Drawing(880, 300, "What crosses the link and what stays on the edge")
    d.sites(236, (20, 220, "edge"), (660, 200, "cloud"))
    d.label(130, 68, "stays here", colour=GREY, size=13)
    for index, text in enumerate(_STAYS):
        d.named_box(40, 84 + 38 * index, 180, 28, text, "#ffffff", BLUE)
    d.label(760, 68, "runs here", colour=GREY, size=13)
    d.named_box(680, 84, 160, 28, "layers between", "#ffffff", GREEN)
    for index, (text, way, colour) in enumerate(_CROSSES):
        y = 92 + 50 * index
        d.label(450, y - 12, text, size=13)
        d.arrow([(244, y), (656, y)], colour)
        if way == "both":
            d.arrow([(656, y + 7), (244, y + 7)], colour)
    return d.text
