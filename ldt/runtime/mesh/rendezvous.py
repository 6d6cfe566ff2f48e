"""Check-in: all ranks of a mesh meet at the store, under a deadline, before any communicator is made."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ldt.errors import LdtError
from ldt.runtime.common.untrusted import as_str_dict, parse, plain, quoted, read_or_raise
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["check_in", "mesh_key", "refuse", "share"]

_POLL_SECONDS = 0.02
_COMPLETE = "complete"
_SPELLED = 16  # ranks whose numbers are in the name; it goes with every question to the store


def mesh_key(store: Any, rank: int, ranks: Sequence[int]) -> str:
    """A name for the next mesh over ``ranks`` (global ones) that is the same on all of them and never used again.

    The store counts how often ``rank`` has connected over exactly these ranks, which all do equally often. Where all
    processes are started anew, they need a store, or a part of one, of their own.
    """
    names = "_".join(map(str, ranks))
    mesh = f"ldt/{names if len(ranks) <= _SPELLED else hashlib.sha256(names.encode()).hexdigest()[:16]}"
    return f"{mesh}/{store.add(f'{mesh}/connects/{rank}', 1)}"


def check_in(
    store: Any, key: str, rank: int, ranks: Sequence[int], settings: dict[str, str], seconds: float
) -> None:
    """Wait until all ``ranks`` (global ones) have come with the same ``settings``.

    Raises LdtError on every rank that came: after ``seconds``, naming the ranks that did not come, or naming the
    ranks whose settings differ and both values. A rank that comes later learns that the others gave up.
    """
    store.set(
        f"{key}/here/{rank}", json.dumps({**settings, "host": socket.gethostname(), "pid": os.getpid()})
    )
    _wait_for_all(store, key, ranks, seconds)
    cards = {other: _read(store, f"{key}/here/{other}", other, _card) for other in ranks}
    for name, mine in settings.items():
        differing = {other: card.get(name) for other, card in cards.items() if card.get(name) != mine}
        if differing:
            theirs = "; ".join(f"rank {other} has {quoted(value)}" for other, value in differing.items())
            raise LdtError(
                f"connect: {name} must be the same on all ranks: rank {rank} has {mine!r}, {theirs}"
            )


def refuse(store: Any, key: str, why: str) -> NoReturn:
    """Instead of checking in: raise LdtError, on every rank that comes."""
    store.compare_set(f"{key}/verdict", "", why)
    raise LdtError(f"connect: {why}")


def share(
    store: Any,
    key: str,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    watchdog: Watchdog,
    deadline: float,
) -> list[Any]:
    """Give ``value``, a bool or texts by name, to all ``ranks`` (global ones) under ``key``; returns what each gave.

    Raises LdtError naming the ranks that did not by ``deadline`` (``time.monotonic()``), or one that gave a thing of
    another kind than this rank, RemoteStageError if another rank failed.
    """
    store.set(f"{key}/{rank}", json.dumps(value))
    while not store.check([f"{key}/{other}" for other in ranks]):
        watchdog.check()
        if time.monotonic() > deadline:
            missing = [other for other in ranks if not store.check([f"{key}/{other}"])]
            raise LdtError(f"connect: ranks {missing} did not give their {key} in time; look at their output")
        time.sleep(_POLL_SECONDS)
    read = _flag if isinstance(value, bool) else as_str_dict
    return [_read(store, f"{key}/{other}", other, read) for other in ranks]


def _wait_for_all(store: Any, key: str, ranks: Sequence[int], seconds: float) -> None:
    """Returns if all ranks decide to go on, raises on all of them otherwise: whoever decides first, decides for all."""
    deadline = time.monotonic() + seconds
    verdict = f"{key}/verdict"
    while not store.check([verdict]):
        if store.check([f"{key}/here/{rank}" for rank in ranks]):
            store.compare_set(verdict, "", _COMPLETE)
        elif time.monotonic() > deadline:
            missing = [rank for rank in ranks if not store.check([f"{key}/here/{rank}"])]
            store.compare_set(verdict, "", _missing_text(missing, ranks, seconds) if missing else _COMPLETE)
        else:
            time.sleep(_POLL_SECONDS)
    decided = store.get(verdict).decode(errors="replace")
    if decided != _COMPLETE:
        raise LdtError(f"connect: {plain(decided)}")


def _read(store: Any, key: str, rank: int, read: Callable[[Any], Any]) -> Any:
    """What ``rank`` left under ``key``. Raises LdtError naming it if that is no JSON, or not what ``read`` takes."""
    return read_or_raise(store.get(key), lambda data: read(parse(data)), f"connect: rank {rank}")


def _card(value: Any) -> dict[str, str]:
    """The texts of a card; its number of a process is for people who look into the store."""
    return as_str_dict({name: entry for name, entry in dict(value).items() if name != "pid"})


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("expected true or false")


def _missing_text(missing: Sequence[int], ranks: Sequence[int], seconds: float) -> str:
    return (
        f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {list(ranks)} did not come to connect "
        f"within {seconds:g} s, so the others gave up: look at the output of those processes, or give a longer timeout"
    )
