"""What the live view shows, as text and as a table of rich."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health.progress import RankStatus

__all__ = ["LinkUse", "Snapshot", "line_of", "table_of"]

_SHOWN_RANKS = 16  # more take more than a hundredth of a second to draw
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


@dataclass(frozen=True)
class LinkUse:
    """``rate``: bytes per second. ``share``: of the bandwidth, if that is known."""

    rate: float
    share: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run. Figures are None before the first step."""

    step: int
    loss: float | None = None
    seconds: float | None = None
    tokens: float | None = None
    bubble: float | None = None
    links: Mapping[str, LinkUse] = field(default_factory=dict)
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    busy: Mapping[int, float] = field(default_factory=dict)


def line_of(seen: Snapshot) -> str:
    """A line for a log."""
    return ", ".join([*_figures(seen), *(f"{name} {_use(use)}" for name, use in seen.links.items())])


def table_of(seen: Snapshot, rank_info: RankInfo) -> Any:
    """What rich renders."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    links = Table("link", "in use", box=None, pad_edge=False)
    for name, use in seen.links.items():
        links.add_row(Text(name), Text(_use(use)))
    ranks = Table("rank", "node", "busy", "doing", box=None, pad_edge=False)
    for rank in rank_info.ranks[:_SHOWN_RANKS]:
        busy = seen.busy.get(rank)
        share = "" if busy is None else f"{busy:.0%}"
        status = seen.statuses.get(rank)
        doing = Text("not seen yet" if status is None else _doing(status), overflow="ellipsis", no_wrap=True)
        ranks.add_row(str(rank), str(rank_info.node_of(rank)), share, doing)
    hidden = len(rank_info.ranks) - _SHOWN_RANKS
    more = [Text(f"and {hidden} more ranks")] if hidden > 0 else []
    return Group(Text(", ".join(_figures(seen))), *([links] if seen.links else []), ranks, *more)


def _figures(seen: Snapshot) -> Iterator[str]:
    yield f"step {seen.step}"
    if seen.loss is not None:
        yield f"loss {seen.loss:.4g}"
    if seen.seconds is not None:
        yield f"{seen.seconds:.3g} s/step"
    if seen.tokens is not None:
        yield f"{seen.tokens:,.0f} tokens/s"
    if seen.bubble is not None:
        yield f"bubble {seen.bubble:.0%}"


def _use(use: LinkUse) -> str:
    scale, unit = next((one for one in _UNITS if use.rate >= one[0]), _UNITS[-1])
    share = "" if use.share is None else f" ({use.share:.0%} of the bandwidth)"
    return f"{use.rate / scale:.1f} {unit}{share}"


def _doing(status: RankStatus) -> str:
    if status.closed:
        return "has closed its mesh"
    if not status.call:
        return "between calls"
    waiting = f", waits for {status.waits_for}, {status.seconds:.1f} s" if status.waits_for else ""
    action = status.action.removeprefix("action ").partition(":")[0]  # such as "1F3 (12 of 64)"
    return (action or status.call) + waiting


class BusyShares:
    """How often each rank was seen in a call and not waiting, among the last times that it was seen."""

    def __init__(self, kept: int = 60) -> None:
        self._kept = kept
        self._seen: dict[int, deque[tuple[int, bool]]] = {}

    def add(self, statuses: Mapping[int, RankStatus]) -> None:
        for rank, status in statuses.items():
            seen = self._seen.setdefault(rank, deque(maxlen=self._kept))
            if not seen or seen[-1][0] != status.beat:
                seen.append((status.beat, bool(status.call) and not status.is_waiting))

    def shares(self) -> dict[int, float]:
        return {rank: _share([busy for _, busy in seen]) for rank, seen in self._seen.items()}


def _share(busy: Sequence[bool]) -> float:
    return sum(busy) / len(busy)
