"""WireGuard between the two namespaces of an emulated link, in user space where the kernel has none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ldt.testing import allowed

__all__ = ["PORT", "check_wireguard", "tunnel", "write_files"]

PORT = 51820
_NEEDED = ("wg", "wg-quick", "wireguard-go", "ip")


def check_wireguard() -> None:
    """Skip the test where no tunnel can be made."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"a tunnel needs {', '.join(missing)}: apt-get install wireguard-go wireguard-tools")


@contextmanager
def tunnel(job: Path, places: tuple[Any, Any], interfaces: tuple[str, str]) -> Iterator[None]:
    """Write both files beside ``job``, as its users do, and have the tunnel up meanwhile.

    The cloud's end comes first, which would answer by ICMP that its port is closed.
    """
    write_files(job)
    spaces = list(zip((place.namespace for place in places), interfaces, strict=True))
    try:
        for namespace, interface in reversed(spaces):
            _run("ip", "netns", "exec", namespace, "wg-quick", "up", str(job.parent / f"{interface}.conf"))
        yield
    finally:
        for namespace, interface in spaces:
            with suppress(subprocess.CalledProcessError):  # it did not come up
                _run("ip", "netns", "exec", namespace, "ip", "link", "delete", "dev", interface)


def write_files(job: Path) -> tuple[str, str]:
    """Run the three commands. Returns the public keys."""
    command = [sys.executable, "-m", "ldt", "tunnel", str(job), "--folder", str(job.parent), "--site"]
    edge = _run(*command, "edge")
    cloud = _run(*command, "cloud", "--peer", edge)
    assert _run(*command, "edge", "--peer", cloud) == edge
    return edge, cloud


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=allowed(30.0), check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip()
