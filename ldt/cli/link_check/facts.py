"""What sites tell each other: a line of JSON each, whose schema is a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from ldt.launch.reach import Outcome
from ldt.runtime.comm.socket_choice import TcpLimits
from ldt.runtime.comm.socket_probe import LinkProbe

__all__ = [
    "OTHER_PORTS",
    "Advice",
    "Arrived",
    "Block",
    "Chosen",
    "Door",
    "HostFacts",
    "Outcomes",
    "Ping",
    "Pong",
    "Reached",
    "RoundTrip",
    "Sent",
]

Outcomes = dict[str, Outcome]  # by port of the other site, as text; OTHER_PORTS for one that was free there
OTHER_PORTS = "other ports"


@dataclass(frozen=True)
class HostFacts:
    """A site's host."""

    site: str
    digests: dict[str, str]  # of its description
    versions: dict[str, str]
    sysctls: dict[str, str]
    mtu: int  # of the site's interface
    limits: TcpLimits


@dataclass(frozen=True)
class Chosen:
    """Of some connections, the one to talk over."""

    chosen: bool = True


@dataclass(frozen=True)
class Door:
    """A free port where the site listens, and what those must know who connect there to be measured."""

    port: int
    token: str

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535 or len(self.token) != 32 or not self.token.isascii():
            raise ValueError("it has no port, or another token than expected")


@dataclass(frozen=True)
class Reached:
    """How the ports of the other site answered."""

    outcomes: Outcomes


@dataclass(frozen=True)
class Ping:
    """Asks for the time."""


@dataclass(frozen=True)
class Pong:
    """Seconds since the epoch by the clock of the site."""

    time: float


@dataclass(frozen=True)
class RoundTrip:
    """Seconds of the fastest of some round trips, and by how many the other site's clock is ahead."""

    seconds: float
    ahead: float


@dataclass(frozen=True)
class Block:
    """Takes many packets of full size."""

    zeros: str


@dataclass(frozen=True)
class Arrived:
    """Whether the block did."""

    arrived: bool


@dataclass(frozen=True)
class Sent:
    """What a site saw of what it sent, and the path's MTU; 0 if the kernel does not say."""

    probe: LinkProbe
    path_mtu: int


@dataclass(frozen=True)
class Advice:
    """Sentences that say what to change at the site."""

    sentences: list[str]
