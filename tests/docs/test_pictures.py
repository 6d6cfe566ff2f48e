"""The pictures of the documents equal what their code draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pages import ROOT

PICTURES = ROOT / "docs" / "pictures"
NAMES = sorted(path.stem for path in PICTURES.glob("*.svg"))


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PICTURES))
    import draw

    drawn = draw.PICTURES[name]()
    assert drawn == Path(PICTURES, f"{name}.svg").read_text(encoding="utf-8"), (
        "run python docs/pictures/draw.py"
    )
    assert set(draw.PICTURES) == set(NAMES)
    for module in ("draw", "links", "svg", "u_shape"):
        sys.modules.pop(module, None)
