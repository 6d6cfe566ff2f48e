"""What a rank does while links are measured: round trips and trains of messages, many of them at once."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from ldt.errors import LdtError
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.packed_message import receive_message
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.health.watchdog import Watchdog

__all__ = ["Task", "arrived_by", "receive_train", "round_trips", "run_tasks", "send_trains"]

Task = Iterator[CompositeWork]  # yields what it waits for, one work after the other
_LABEL = "probe"
_POLL_SECONDS = 1e-5


def run_tasks(
    tasks: Sequence[Task], watchdog: Watchdog, deadline: float = math.inf, what: str = "the links"
) -> None:
    """Run all tasks at once, each on whenever its work is done.

    Raises LdtError if they have not ended by ``deadline`` (``time.monotonic()``), RemoteStageError if another rank
    failed, and the error of a work that failed.
    """
    waiting = [(task, work) for task in tasks for work in _next(task)]
    while waiting:
        before = waiting
        waiting = []
        moved = False
        for task, work in before:
            if work.is_completed():
                work.wait()
                moved = True
                waiting += [(task, following) for following in _next(task)]
            else:
                waiting.append((task, work))
        if not moved:
            watchdog.check()
            if time.monotonic() > deadline:
                raise LdtError(f"measuring {what} took too long: give connect a longer timeout")
            time.sleep(_POLL_SECONDS)


def _next(task: Task) -> list[CompositeWork]:
    """The next work of ``task``; none if it has ended."""
    work = next(task, None)
    return [] if work is None else [work]


def round_trips(
    there: Endpoint | None,
    back: Endpoint | None,
    number: int,
    device: torch.device,
    seconds: list[float],
    nbytes: int = 1,
) -> Task:
    """Exchange ``number`` messages of ``nbytes``, each for one byte. The rank that begins appends their seconds."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for _ in range(number):
        start = time.perf_counter()
        for endpoint, tensor in ((there, message), (back, message[:1])):
            if endpoint is not None:
                yield from _started((endpoint.send if endpoint.sends else endpoint.receive)([tensor], _LABEL))
        if there is not None and there.sends:
            seconds.append(time.perf_counter() - start)


def send_trains(
    endpoints: Sequence[Endpoint], nbytes: int, number: int, depth: int, device: torch.device
) -> Task:
    """Send ``number`` messages of ``nbytes`` on each endpoint, in turns, with at most ``depth`` of each on their way.

    In turns, since a transport may send in the order of the calls.
    """
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    works: deque[CompositeWork] = deque()
    for _ in range(number):
        for endpoint in endpoints:
            if len(works) == depth * len(endpoints):
                yield works.popleft()
            works.extend(_started(endpoint.send([message], _LABEL)))
    yield from works


def receive_train(
    endpoint: Endpoint, nbytes: int, number: int, depth: int, device: torch.device, arrivals: list[float]
) -> Task:
    """Receive a train of ``send_trains``, and append when each message has arrived (``time.perf_counter()``)."""
    spec = TensorSpec((nbytes,), torch.uint8)
    works: deque[CompositeWork] = deque()
    posted = 0
    while len(arrivals) < number:
        while posted < number and len(works) < depth:
            works.append(receive_message(endpoint, [spec], [spec.shape], device, _LABEL).work)
            posted += 1
        yield works.popleft()
        arrivals.append(time.perf_counter())


def _started(work: CompositeWork | None) -> list[CompositeWork]:
    """``work`` if this rank has a part in the message."""
    return [] if work is None else [work]


def arrived_by(moment: float, arrivals: Sequence[float], nbytes: int) -> float:
    """Bytes of a train that had arrived by ``moment``. Times count from its start; messages have ``nbytes``.

    The bytes of a message arrive evenly from the arrival of the one before to its own.
    """
    whole = bisect_right(arrivals, moment)
    if whole == len(arrivals):
        return float(whole * nbytes)
    before = arrivals[whole - 1] if whole else 0.0
    return nbytes * (whole + (moment - before) / (arrivals[whole] - before))
