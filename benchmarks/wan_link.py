"""A wide-area link on one host: two network namespaces and an emulator in between, with real TCP at both ends.

The emulator (``wan_emulator.c``, compiled on first use) gives each direction a rate, a drop-tail queue, a delay and
random loss. All that ranks of one namespace send to the other shares that link. Ranks of one namespace talk over its
loopback. Both namespaces keep the kernel's default socket buffers, and use cubic by default. Needs Linux,
root, /dev/net/tun, pyroute2 and a C compiler.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from two_hosts import Place, namespaces

__all__ = ["Counters", "Link", "Settings", "check_wan", "wide_area_link"]

SOURCE = Path(__file__).with_name("wan_emulator.c")
ADDRESSES = ("10.88.0.1", "10.88.0.2")
DEVICE, MTU = "wan0", 1500
DIRECTION = struct.Struct("4d9Q")  # as in the emulator
FIELDS = ("rate", "delay", "loss", "queue", "cut", "no_syn", "only_udp")
WHOLE = FIELDS[4:]
# What Linux has by default on a machine with enough memory; a namespace starts with the host's.
SYSCTLS = {
    "tcp_rmem": "4096 131072 6291456",
    "tcp_wmem": "4096 16384 4194304",
    "tcp_no_metrics_save": "1",
}


@dataclass(frozen=True)
class Settings:
    """One direction. ``rate`` in bytes/s, ``delay`` in seconds one way, ``loss`` as a share of packets.

    ``queue`` is in bytes; None is one product of bandwidth and round trip, at least 64 full segments' worth.
    """

    rate: float
    delay: float = 0.0
    loss: float = 0.0
    queue: float | None = None

    @property
    def queue_bytes(self) -> float:
        product = self.rate * 2 * self.delay
        return max(product, 1 << 20) if self.queue is None else self.queue


class Counters(NamedTuple):
    """Of one direction since the link is up, as counted at the bottleneck; ``bytes`` with headers of IP and TCP."""

    bytes: int
    packets: int
    lost: int
    overflowed: int
    largest_backlog: int
    refused: int


@dataclass(frozen=True)
class Link:
    """A running link, for its own process and for ranks. Direction 0 is from the edge to the cloud, 1 the other way."""

    places: tuple[Place, Place]
    control: str

    def counters(self, direction: int) -> Counters:
        with self._mapped() as shared:
            values = DIRECTION.unpack_from(shared, direction * DIRECTION.size)
        return Counters(*values[len(FIELDS) :])

    def set(self, direction: int, **values: float) -> None:
        """Change ``rate``, ``delay``, ``loss``, ``queue``, ``cut``, ``no_syn`` or ``only_udp`` (a port) at any time."""
        with self._mapped() as shared:
            for name, value in values.items():
                index = FIELDS.index(name)
                whole = name in WHOLE
                number = int(value) if whole else float(value)
                place = direction * DIRECTION.size + 8 * index
                struct.pack_into("Q" if whole else "d", shared, place, number)

    @contextmanager
    def _mapped(self) -> Iterator[mmap.mmap]:
        with Path(self.control).open("r+b") as file, mmap.mmap(file.fileno(), 2 * DIRECTION.size) as shared:
            yield shared


@contextmanager
def wide_area_link(up: Settings, down: Settings | None = None, congestion: str = "cubic") -> Iterator[Link]:
    """A link of ``up`` from the edge to the cloud and ``down`` back (default: the same). One at a time in a process."""
    program = _compiled()
    with ExitStack() as undo:
        undo.enter_context(_allowed(congestion))
        names = undo.enter_context(namespaces())
        for name in names:
            _set_sysctls(name, congestion)
        control = undo.enter_context(tempfile.NamedTemporaryFile(prefix="ldt-wan-"))
        control.truncate(2 * DIRECTION.size)
        link = Link((Place(names[0], DEVICE), Place(names[1], DEVICE)), control.name)
        for direction, settings in enumerate((up, down or up)):
            link.set(
                direction,
                rate=settings.rate,
                delay=settings.delay,
                loss=settings.loss,
                queue=settings.queue_bytes,
            )
        command = [str(program), names[0], ADDRESSES[0], names[1], ADDRESSES[1], str(MTU), control.name]
        emulator = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        undo.callback(_end, emulator)
        assert emulator.stdout is not None
        if emulator.stdout.readline() != "ready\n":
            raise OSError(f"the emulator did not start: {emulator.communicate(timeout=10)[1].strip()}")
        yield link


def check_wan() -> None:
    """Try it. Raises ValueError with what is missing here."""
    try:
        with wide_area_link(Settings(1e6)):
            pass
    except ImportError:
        raise ValueError("a wide-area link needs pyroute2: pip install pyroute2") from None
    except (OSError, subprocess.SubprocessError, _netlink_error()) as error:
        raise ValueError(
            f"a wide-area link needs Linux, root, /dev/net/tun and a C compiler, got {error!r}"
        ) from error


def _compiled() -> Path:
    """The emulator's program, built unless it is there and newer than its source."""
    program = Path(tempfile.gettempdir()) / f"ldt-wan-emulator-{os.getuid()}"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if compiler is None:
            raise OSError("found no C compiler (cc, gcc, clang)")
        made = program.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O2", "-o", str(made), str(SOURCE)], check=True, capture_output=True, timeout=60
        )
        made.replace(program)
    return program


@contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Let namespaces use this algorithm: the host must allow it to all, unless it does."""
    file = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    before = file.read_text()
    if congestion in before.split():
        yield
        return
    file.write_text(f"{before.strip()} {congestion}")
    try:
        yield
    finally:
        file.write_text(before)


def _set_sysctls(namespace: str, congestion: str) -> None:
    """In a process of its own: /proc/sys/net shows the namespace of the process that reads it."""
    values = {**SYSCTLS, "tcp_congestion_control": congestion}
    script = f"from pyroute2 import netns; netns.setns({namespace!r}, flags=0)\n" + "".join(
        f"with open('/proc/sys/net/ipv4/{name}', 'w') as file: file.write({value!r})\n"
        for name, value in values.items()
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise OSError(f"cannot set sysctls in {namespace}: {done.stderr.strip().splitlines()[-1]}")


def _end(emulator: subprocess.Popen[str]) -> None:
    assert emulator.stdin is not None
    with suppress(BrokenPipeError):
        emulator.stdin.close()
    try:
        emulator.wait(timeout=5)
    except subprocess.TimeoutExpired:
        emulator.kill()
        emulator.wait()


def _netlink_error() -> type[Exception]:
    with suppress(ImportError):
        from pyroute2 import NetlinkError

        error: type[Exception] = NetlinkError
        return error
    return OSError
