"""The sockets that this process listens on, from procfs."""

from __future__ import annotations

from pathlib import Path

LISTEN = "0A"  # the state of a TCP socket in /proc/net/tcp
ACCEPTS = 0x10000  # the flag of a listening Unix socket in /proc/net/unix


def listeners() -> set[str]:
    """Return ``address:port`` (hexadecimal) of TCP sockets, and the path or inode of Unix sockets."""
    mine = own_sockets()
    found = set()
    for table in ("tcp", "tcp6"):
        for fields in rows(table):
            if fields[3] == LISTEN and fields[9] in mine:
                found.add(fields[1])
    for fields in rows("unix"):
        if int(fields[3], 16) & ACCEPTS and fields[6] in mine:
            found.add(" ".join(fields[6:]))
    return found


def own_sockets() -> set[str]:
    """Return the inodes of this process's open sockets."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def rows(table: str) -> list[list[str]]:
    path = Path("/proc/net") / table
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
