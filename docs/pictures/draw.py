"""Draws the pictures of the documents: ``python docs/pictures/draw.py`` writes them beside this file."""

from __future__ import annotations

from pathlib import Path

import links
import u_shape

PICTURES = {
    "crossing": links.crossing,
    "lanes": links.lanes,
    "laps": u_shape.laps,
    "timeline": u_shape.timeline,
    "transfers": links.transfers,
    "u": u_shape.the_u,
}


def main() -> None:
    """Write every picture."""
    for name, picture in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
