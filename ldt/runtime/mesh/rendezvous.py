"""Rendezvous over the store: all ranks of a mesh check in, under a deadline, before any communicator is created."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import as_str_dict, parse, plain, quoted, read_or_raise
from ldt.runtime.health.store_connection import StoreConnection
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["answering", "ask", "check_in", "mesh_key", "refuse", "share", "share_all"]

_T = TypeVar("_T")

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
_COMPLETE = "complete"
_MAX_SPELLED = 16  # ranks spelled out in a key, which every request to the store carries; more are hashed


def mesh_key(store: Any, rank: int, ranks: Sequence[int]) -> str:
    """Return a key for the next mesh over the global ``ranks``, equal on all of them and never used again.

    The store counts how often ``rank`` has connected over exactly these ranks, which is equal on all of them.
    Restarted processes need a new store or a ``PrefixStore`` of their own. Raises LdtError if it does not answer.
    """
    names = "_".join(map(str, ranks))
    mesh = f"ldt/{names if len(ranks) <= _MAX_SPELLED else hashlib.sha256(names.encode()).hexdigest()[:16]}"
    with answering():  # or else it may have counted, so asking again could count twice
        return f"{mesh}/{store.add(f'{mesh}/connects/{rank}', 1)}"


def check_in(
    store: Any,
    key: str,
    rank: int,
    ranks: Sequence[int],
    settings: Mapping[str, str],
    seconds: float,
    facts: Mapping[str, str] | None = None,
) -> dict[int, dict[str, str]]:
    """Wait until all global ``ranks`` have checked in with equal ``settings``. Returns the ``facts`` of each, and more.

    Raises LdtError on every rank that checked in: after ``seconds``, naming the missing ranks, or naming the ranks
    whose settings differ and both values. A rank that comes later raises what the others raised.
    """
    card = {**settings, **(facts or {}), "host": socket.gethostname(), "pid": os.getpid()}
    store.set(f"{key}/here/{rank}", json.dumps(card))
    _wait_for_all(store, key, ranks, seconds)
    texts = store.multi_get([f"{key}/here/{other}" for other in ranks])
    cards = {other: _read(text, other, _card) for other, text in zip(ranks, texts, strict=True)}
    for name, local in settings.items():
        differing = {other: card.get(name) for other, card in cards.items() if card.get(name) != local}
        if differing:
            remote = "; ".join(f"rank {other} has {quoted(value)}" for other, value in differing.items())
            raise LdtError(
                f"connect: {name} must be the same on all ranks: rank {rank} has {local!r}, {remote}"
            )
    return cards


@contextmanager
def answering() -> Iterator[None]:
    """Requests to the store before the ranks watch each other. Raises LdtError if it does not answer."""
    try:
        yield
    except LdtError:  # RemoteStageError is a RuntimeError, too
        raise
    except (RuntimeError, OSError) as error:
        text = str(error).partition("\n")[0]  # without torch's stack
        raise LdtError(
            f"connect: the store of the process group does not answer: {text}. The process that hosts it, rank 0 of "
            "the world or the launcher, has exited, or the link to it is down: look at its output. If the link may be "
            "down for so long, pass connect a longer outage"
        ) from error


def ask(store: StoreConnection, call: Callable[[Any], _T]) -> _T:
    """Return ``call(store)``. Calls again over a new connection if this one breaks and the store is there.

    Raises LdtError if the store does not answer, and what ``call`` raises.
    """
    with answering():
        try:
            return call(store)
        except LdtError:
            raise
        except (RuntimeError, OSError):
            if not store.renew():
                raise
        return call(store)


def refuse(store: Any, key: str, why: str) -> NoReturn:
    """Refuse instead of checking in: raises LdtError here and on every rank that checks in."""
    with answering():
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
    """All-gather ``value``, a bool or a dict of texts, over the global ``ranks`` under ``key``. See ``share_all``."""
    return share_all(store, {key: ranks}, {key: value}, rank, watchdog, deadline)[key]


def share_all(
    store: Any,
    ranks: Mapping[str, Sequence[int]],
    values: Mapping[str, Any],
    rank: int,
    watchdog: Watchdog,
    deadline: float,
) -> dict[str, list[Any]]:
    """All-gather the value of each key, a bool or a dict of texts, over the global ``ranks`` of that key.

    Takes three round trips to the store. Raises LdtError naming the ranks that sent nothing until a second after
    ``deadline`` (``time.monotonic()``), at which a late rank raises what it knows itself, or one that sent another
    type than this rank; RemoteStageError if another rank failed.
    """
    store.multi_set([f"{key}/{rank}" for key in values], [json.dumps(value) for value in values.values()])
    senders = [(f"{key}/{other}", other) for key in values for other in ranks[key]]
    while not store.check([name for name, _ in senders]):
        watchdog.check()
        if time.monotonic() > deadline + _GRACE_SECONDS:
            late = [(other, name.rpartition("/")[0]) for name, other in senders if not store.check([name])]
            missing = sorted({other for other, _ in late})
            key = late[0][1] if late else "values"
            raise LdtError(f"connect: ranks {missing} did not send their {key} in time; look at their output")
        time.sleep(_POLL_SECONDS)
    texts = iter(store.multi_get([name for name, _ in senders]))
    return {
        key: [
            _read(next(texts), other, _flag if isinstance(value, bool) else as_str_dict)
            for other in ranks[key]
        ]
        for key, value in values.items()
    }


def _wait_for_all(store: Any, key: str, ranks: Sequence[int], seconds: float) -> None:
    """Wait until a rank has written the verdict, which holds for all ranks. Raises LdtError unless it is to go on."""
    deadline = time.monotonic() + seconds
    verdict = f"{key}/verdict"
    proposal = ""
    while not proposal and not store.check([verdict]):
        if store.check([f"{key}/here/{rank}" for rank in ranks]):
            proposal = _COMPLETE
        elif time.monotonic() > deadline:
            missing = [rank for rank in ranks if not store.check([f"{key}/here/{rank}"])]
            proposal = _missing_text(missing, ranks, seconds) if missing else _COMPLETE
        else:
            time.sleep(_POLL_SECONDS)
    text = store.compare_set(verdict, "", proposal or _COMPLETE).decode(errors="replace")
    if text != _COMPLETE:
        raise LdtError(f"connect: {plain(text)}")


def _read(text: Any, rank: int, read: Callable[[Any], Any]) -> Any:
    """Read what ``rank`` wrote. Raises LdtError naming it if that is not JSON, or ``read`` rejects it."""
    return read_or_raise(text, lambda data: read(parse(data)), f"connect: rank {rank}")


def _card(value: Any) -> dict[str, str]:
    """The settings and host of a rank. Its ``pid`` is only for people who look into the store."""
    return as_str_dict({name: entry for name, entry in dict(value).items() if name != "pid"})


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("expected true or false")


def _missing_text(missing: Sequence[int], ranks: Sequence[int], seconds: float) -> str:
    return (
        f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {list(ranks)} did not come to connect "
        f"within {seconds:g} s, so the others gave up: look at the output of those processes and whether the link to "
        "them is up, or give a longer timeout"
    )
