"""Draws a few shapes as SVG text. The same calls give the same bytes everywhere, so pictures can be compared."""

from __future__ import annotations

from html import escape

BLUE, GREEN, ORANGE, GREY = "#3f6fb5", "#4d8f45", "#c9761b", "#6b7280"
EDGE, CLOUD, PLAIN = "#e3ecfa", "#e6f3e2", "#f3f4f6"
INK = "#1f2937"

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="system-ui, sans-serif" font-size="14">
<title>{title}</title>
<defs>{markers}</defs>
<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>
"""
_MARKER = (
    '<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
)


class Drawing:
    """Collects shapes; ``text`` is the picture. Lengths are in pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []
        self._colours: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str = "none") -> None:
        """Draw a rectangle with round corners."""
        frame = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect {frame} rx="6" fill="{fill}" stroke="{line}"/>')

    def label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = INK,
        size: int = 14,
        bold: bool = False,
        anchor: str = "middle",
    ) -> None:
        """Draw a line of text with its middle at (x, y), or with ``anchor="start"`` its beginning."""
        style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"' + (
            ' font-weight="600"' if bold else ""
        )
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y + size * 0.35)}" {style}>{escape(text)}</text>')

    def named_box(
        self, x: float, y: float, width: float, height: float, text: str, fill: str, line: str
    ) -> None:
        """Draw a rectangle with a text in its middle."""
        self.box(x, y, width, height, fill, line)
        self.label(x + width / 2, y + height / 2, text)

    def sites(self, height: float, *sites: tuple[float, float, str]) -> None:
        """Draw the edge and the cloud side by side, each from its left, its width and its name."""
        for (x, width, _), fill in zip(sites, (EDGE, CLOUD), strict=True):
            self.box(x, 44, width, height, fill)
        for x, width, name in sites:
            self.label(x + width / 2, 24, name, bold=True)

    def line(
        self, points: list[tuple[float, float]], colour: str, *, width: float = 1, dashed: bool = False
    ) -> None:
        self._path(points, colour, width, dashed, "")

    def arrow(
        self, points: list[tuple[float, float]], colour: str, *, width: float = 2, dashed: bool = False
    ) -> None:
        """Draw a line through ``points`` with an arrow head at its end."""
        if colour not in self._colours:
            self._colours.append(colour)
        self._path(points, colour, width, dashed, f' marker-end="url(#{_marker(colour)})"')

    def _path(
        self, points: list[tuple[float, float]], colour: str, width: float, dashed: bool, end: str
    ) -> None:
        way = " ".join(f"{'M' if index == 0 else 'L'}{_n(x)} {_n(y)}" for index, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"{dash}{end}/>'
        )

    @property
    def text(self) -> str:
        width, height = self._size
        markers = "".join(_MARKER.format(name=_marker(colour), colour=colour) for colour in self._colours)
        head = _HEAD.format(width=width, height=height, title=escape(self._title), markers=markers)
        return head + "\n".join(self._parts) + "\n</svg>\n"


def _marker(colour: str) -> str:
    return f"head-{colour[1:]}"


def _n(value: float) -> str:
    """Format a number without invisible digits."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
