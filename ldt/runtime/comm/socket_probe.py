"""Measures the links that connections cross, for ``connections="auto"``: round trip, bandwidth, loss."""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from ldt.runtime.comm.socket_dial import Check
from ldt.runtime.comm.socket_options import set_pace, set_unsent

__all__ = ["NUM_PROBES", "LinkProbe", "best_rate", "probe"]

NUM_PROBES = 8  # connections that measure, so that all of a long link is soon in use
_MORE, _END = b"\1" * (64 << 10), b"\0"
_TICK = 0.01
_STEP = 0.05  # seconds that a rate is for
_AVERAGED = 0.15  # seconds over which the best rate is taken, at least: fewer show how the host schedules
_AVERAGED_ROUND_TRIPS = (
    2  # at least: acknowledgements come in bursts, one in a round trip through full queues
)
_START_ROUND_TRIPS, _MOST_SECONDS = 9, 8.0  # to reach the rate: slow starts double it in each round trip
_LOSS_SECONDS, _LOSS_LOAD = 0.4, 0.4  # a part of the rate at which no queue overflows
_SETTLES = 0.15  # until other ranks are in this phase, too
_LEAST_LOST, _LEAST_LOSS = 3, 3e-4
_MOST = 1e15  # of a figure that the other end sends: products of two are still finite
# struct tcp_info of Linux: offsets of counts of segments, of min_rtt in microseconds, and of the size of a segment.
_TCP_INFO = 200
_STARTS_FAST = b"reno"  # everybody may use it, and it grows until a queue is full; cubic ends its start early
_OFFSETS = {"mss": 16, "unacked": 24, "retransmits": 100, "min_rtt": 148, "sent": 156, "delivered": 192}


@dataclass(frozen=True)
class LinkProbe:
    """What one end saw of what it sent.

    Attributes:
        round_trip: Seconds.
        rates: Bytes per second in each 50 ms from the start, which is about the same at all ends.
        loss: Share of packets; 0 if it saw too few to say.
    """

    round_trip: float
    rates: tuple[float, ...]
    loss: float

    def __post_init__(self) -> None:
        if not all(0 <= value < _MOST for value in (self.round_trip, *self.rates, self.loss)):
            raise ValueError(f"expected positive figures of a link, got {self}")


def best_rate(ends: Sequence[LinkProbe]) -> float:
    """Bytes per second that all ends (one or more) together sent at best, while all of them did.

    Each one's own best may be another's worst.
    """
    together: list[float] = [sum(rates) for rates in zip(*(end.rates for end in ends), strict=False)]
    seconds = _averaged(max(end.round_trip for end in ends))
    count = max(1, min(len(together), math.ceil(seconds / _STEP)))
    return max(
        sum(together[first : first + count]) / count for first in range(max(1, len(together) - count + 1))
    )


def probe(sockets: Mapping[int, Sequence[socket.socket]], check: Check) -> dict[int, LinkProbe]:
    """Both ends call it at about the same time. All peers are measured at once, and both directions.

    First the connections send all they can, then so little that only the link itself can lose it.
    """
    flows = {peer: _Flow(found) for peer, found in sockets.items()}
    _exchange(flows.values(), 1, check)
    found = {peer: flow.begin_second_phase() for peer, flow in flows.items()}
    _exchange(flows.values(), 2, check)
    return {peer: replace(found[peer], loss=flow.loss) for peer, flow in flows.items()}


class _Flow:
    """This end's connections to one peer."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.connections = [_Connection(one) for one in sockets]
        start = _START_ROUND_TRIPS * self.round_trip
        self.seconds = min(start + 2 * _averaged(self.round_trip), _MOST_SECONDS)
        self._samples: list[tuple[float, int]] = []  # seconds since the start, bytes delivered
        self._counts: list[tuple[float, int, int]] = []  # when, sent again, sent

    @property
    def round_trip(self) -> float:
        return min(one.info("min_rtt") for one in self.connections) / 1e6

    @property
    def loss(self) -> float:
        """Share of packets sent again in the second phase; 0 for too few to mean anything."""
        last, end, sent_in_all = self._counts[-1]
        start = self._counts[0][0] + _SETTLES
        first, sent_before = next((lost, sent) for now, lost, sent in self._counts if now >= min(start, last))
        lost, sent = end - first, sent_in_all - sent_before
        return lost / sent if lost >= max(_LEAST_LOST, _LEAST_LOSS * sent) else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Of the steps in which this end sent. Later, as queues drain, acknowledgements come in faster than bytes."""
        moments = [_STEP * index for index in range(1 + round(self.seconds / _STEP))]
        delivered = [_interpolated(self._samples, moment) for moment in moments]
        return tuple((after - before) / _STEP for before, after in pairwise(delivered))

    def sample(self, now: float) -> None:
        """``now`` counts from the start of the phase."""
        self._samples.append((now, sum(one.delivered() for one in self.connections)))
        self._counts.append((now, self._sum("retransmits"), self._sum("sent")))

    def begin_second_phase(self) -> LinkProbe:
        """Returns what the first one found, with no loss."""
        found = LinkProbe(self.round_trip, self.rates, 0.0)
        for connection in self.connections:
            connection.resume(int(_LOSS_LOAD * best_rate([found]) / len(self.connections)))
        self.seconds = _LOSS_SECONDS
        self._counts.clear()
        return found

    def _sum(self, name: str) -> int:
        return sum(one.info(name) for one in self.connections)


class _Connection:
    def __init__(self, socket_: socket.socket) -> None:
        socket_.setblocking(False)
        set_unsent(socket_, len(_MORE))  # the end of a phase must not wait behind much
        self._congestion = socket_.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _STARTS_FAST)
        self._socket = socket_
        self.number = socket_.fileno()
        self.sends = True
        self.ends = 0  # phases that the other end has ended
        self._segments = self._bytes = 0

    def resume(self, pace: int) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion)
        set_pace(self._socket, pace)
        self.sends = True

    def send(self, last: bool) -> None:
        with suppress(BlockingIOError):
            self._socket.send(_END if last else _MORE)
            self.sends = not last

    def read(self, buffer: bytearray) -> None:
        with suppress(BlockingIOError):
            count = self._socket.recv_into(buffer)
            if not count:
                raise ConnectionError("the other end closed a connection while it was measured")
            self.ends += buffer.count(_END, 0, count)

    def delivered(self) -> int:
        """Bytes that have arrived. Segments may become smaller on the way."""
        segments = self.info("delivered")
        self._bytes += (segments - self._segments) * self.info("mss")
        self._segments = segments
        return self._bytes

    def info(self, name: str) -> int:
        data = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
        return int(struct.unpack_from("@I", data, _OFFSETS[name])[0])


def _averaged(round_trip: float) -> float:
    return max(_AVERAGED, _AVERAGED_ROUND_TRIPS * round_trip)


def _interpolated(samples: Sequence[tuple[float, int]], moment: float) -> float:
    """The bytes delivered by ``moment``."""
    after = min(bisect_left(samples, (moment,)), len(samples) - 1)
    (start, before), (end, then) = samples[max(0, after - 1)], samples[after]
    passed = min(1.0, (moment - start) / (end - start)) if end > start else 1.0
    return before + passed * (then - before)


def _exchange(flows: Collection[_Flow], phase: int, check: Check) -> None:
    """Each end of each connection sends until its time is up, then says so; reads until the other end has."""
    poll, start = select.poll(), time.monotonic()
    of_number = {one.number: (flow, one) for flow in flows for one in flow.connections}
    for number in of_number:
        poll.register(number, select.POLLIN | select.POLLOUT)
    buffer, next_tick = bytearray(1 << 20), start
    while any(one.ends < phase or one.sends or one.info("unacked") for _, one in of_number.values()):
        for number, events in poll.poll(_TICK * 1e3):
            flow, one = of_number[number]
            if events & select.POLLOUT:
                one.send(last=time.monotonic() - start > flow.seconds)
            if events & ~select.POLLOUT:
                one.read(buffer)
            wanted = (select.POLLIN if one.ends < phase else 0) | (select.POLLOUT if one.sends else 0)
            poll.modify(number, wanted)
        if (now := time.monotonic()) >= next_tick:
            check("measuring the link did not end")
            next_tick = now + _TICK
            for flow in flows:
                flow.sample(now - start)
