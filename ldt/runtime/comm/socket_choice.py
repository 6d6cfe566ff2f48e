"""Chooses the number of connections, their pace and their congestion control, and names sysctls that would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ldt.runtime.comm.socket_options import BBR, MAX_CONNECTIONS, SocketSettings
from ldt.runtime.comm.socket_probe import LinkProbe, best_rate

__all__ = ["KEEP_WINDOW", "TcpLimits", "TcpPath", "allow_bbr", "choose", "sysctl"]

_SYSCTLS = Path("/proc/sys/net/ipv4")
_STOCK_BUFFER = 4 << 20
KEEP_WINDOW = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
_HEADROOM = 1.15  # of the pace: the rate is measured while windows open, and tends to be low
_SEGMENT = 1448  # bytes of a packet's payload
_MOST_WITH_LOSS = 32  # connections: 64 were no faster at 1 Gb/s, 20 ms, 0.1 % loss
_LONG_SECONDS = 2e-3  # a round trip from which on a full queue and a loss cost more than what avoids them


@dataclass(frozen=True)
class TcpLimits:
    """A host's limits of a connection.

    Attributes:
        window: Bytes that it may have under way.
        allows_bbr: Whether any process may use bbr.
        restarts: Whether a pause of some round trips closes the congestion window.
    """

    window: float
    allows_bbr: bool
    restarts: bool = False

    @classmethod
    def of_this_host(cls) -> TcpLimits:
        buffers = [int(sizes[-1]) for sizes in (sysctl("tcp_rmem"), sysctl("tcp_wmem")) if sizes]
        half = min(buffers, default=_STOCK_BUFFER) / 2  # the kernel needs the rest itself
        allows_bbr = BBR in sysctl("tcp_allowed_congestion_control")
        return cls(half, allows_bbr, sysctl("tcp_slow_start_after_idle") == ["1"])


@dataclass(frozen=True)
class TcpPath:
    """What TCP finds between two sites, as both ends of all pairs of ranks agree."""

    round_trip: float
    rates: tuple[float, float]  # bytes per second from the site that sorts first, and to it
    loss: float
    window: float
    allows_bbr: bool
    restarts: bool

    @classmethod
    def of(
        cls, there: Sequence[LinkProbe], back: Sequence[LinkProbe], limits: Sequence[TcpLimits]
    ) -> TcpPath:
        """From what the ends of all pairs saw, which sent at once."""
        return cls(
            round_trip=min(end.round_trip for end in (*there, *back)),
            rates=(best_rate(there), best_rate(back)),
            loss=max(end.loss for end in (*there, *back)),
            window=max(1.0, min(host.window for host in limits)),
            allows_bbr=all(host.allows_bbr for host in limits),
            restarts=any(host.restarts for host in limits),
        )

    @property
    def product(self) -> float:
        return max(self.rates) * self.round_trip

    @property
    def is_long(self) -> bool:
        return self.round_trip > _LONG_SECONDS

    @property
    def uses_bbr(self) -> bool:
        """Where packets are lost. It also keeps its rate over a pause."""
        return self.is_long and self.loss > 0 and self.allows_bbr

    def advice(self) -> Iterator[str]:
        """Commands for root that would help, each with the reason."""
        if self.product > MAX_CONNECTIONS * self.window:
            size = 2 * math.ceil(self.product / MAX_CONNECTIONS)
            for name in ("tcp_rmem", "tcp_wmem"):
                values = [*sysctl(name)[:2], str(size)]
                yield f'sysctl -w net.ipv4.{name}="{" ".join(values)}" ({MAX_CONNECTIONS} connections do not fill it)'
        if self.loss and not self.allows_bbr:
            yield f"{allow_bbr()} on both sites (it loses packets)"
        if self.restarts and not self.uses_bbr and self.product > self.window:
            yield f"{KEEP_WINDOW} on both sites (after a pause it takes many round trips to fill)"

    def __str__(self) -> str:
        there, back = (f"{rate * 8e-6:.0f}" for rate in self.rates)
        loss = f"{self.loss:.2%} lost" if self.loss else "none lost"
        return f"round trip {self.round_trip * 1e3:.1f} ms, {there} and {back} Mb/s, {loss}"


def choose(path: TcpPath, direction: int) -> SocketSettings:
    """For the end that sends in that direction of ``path.rates``.

    Loss keeps the window of a connection without bbr at 1.22 / sqrt(loss) segments on average (Mathis, Semke, Mahdavi
    and Ott, The macroscopic behavior of the TCP congestion avoidance algorithm, 1997).
    """
    count = max(1, min(MAX_CONNECTIONS, math.ceil(path.product / path.window)))
    if path.uses_bbr:  # a loss at the end of a burst is noticed late, and each connection has an end
        count = math.ceil(count / 2)
    elif path.is_long and path.loss:
        usual_window = 1.22 * _SEGMENT / math.sqrt(path.loss)
        count = max(count, min(_MOST_WITH_LOSS, math.ceil(path.product / usual_window)))
    pace = int(_HEADROOM * path.rates[direction] / count) if path.is_long else 0
    return SocketSettings(count, pace, path.uses_bbr)


def allow_bbr() -> str:
    """The command for root that lets any process of this host use bbr."""
    values = " ".join([*sysctl("tcp_allowed_congestion_control"), BBR])
    return f'modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="{values}"'


def sysctl(name: str) -> list[str]:
    """The words of ``net.ipv4.<name>``; none where it is not to be read."""
    try:
        return (_SYSCTLS / name).read_text().split()
    except OSError:  # another system, or a container that hides it
        return []
