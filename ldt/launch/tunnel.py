"""The file that wg-quick takes for one site of a tunnel. WireGuard's own ``wg`` makes the keys."""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ldt.errors import LdtError
from ldt.launch.description import Description, TunnelTable
from ldt.untrusted import quoted, read_file

__all__ = ["SiteKeys", "check_key", "other_site", "tunnel_of", "write_file"]

INSTALL = "apt install wireguard-tools, or dnf install wireguard-tools"
_MARK = "# Written by python -m ldt tunnel"
_SECONDS = 10.0
_MAX_BYTES = 1 << 16
_KEEPALIVE_SECONDS = 25  # shorter than firewalls and NAT remember a flow of UDP


@dataclass(frozen=True)
class SiteKeys:
    """A site's private key, which stays in its file, and the public key of the other site if it is known."""

    private: str = field(repr=False)
    peer: str | None = None

    @classmethod
    def in_file(cls, file: Path, other: str) -> SiteKeys:
        """The keys in ``file``, or a fresh one if there is no file. ``other`` is the other site.

        Raises LdtError for a file of somebody else.
        """
        lines = _lines_of(file)
        if not lines:
            return cls(_wg("genkey"))
        found = {name: _values(section) for name, section in _sections(lines, other)}
        private = found.get("[Interface]", {}).get("privatekey", "")
        if lines[0] != _MARK or not _is_key(private):
            raise LdtError(f"{file} was not written by this command: move it away, or give another --folder")
        return cls(private, found.get("[Peer]", {}).get("publickey"))

    @property
    def public(self) -> str:
        """This site's public key."""
        return _wg("pubkey", self.private)


def tunnel_of(description: Description) -> TunnelTable:
    """The description's tunnel. Raises LdtError if it has none."""
    if description.tunnel is None:
        raise LdtError(f'{description.path}: it has no [tunnel]: add one with endpoint = "HOST:PORT"')
    return description.tunnel


def other_site(description: Description, site: str) -> str:
    """The site at the other end of the tunnel."""
    (other,) = {*description.sites} - {site}
    return other


def check_key(text: str) -> str:
    """Return a public key. Raises LdtError if it is none."""
    if not _is_key(text):
        raise LdtError(f"--peer must be the public key that the other site printed, got {quoted(text)}")
    return text


def write_file(file: Path, description: Description, site: str, keys: SiteKeys) -> list[str]:
    """Write the file, which only its owner may read. Lines that the user added stay.

    Returns lines that had another value before.
    """
    own = _own_lines(description, site, keys)
    lines, replaced = _updated(_lines_of(file), own, other_site(description, site))
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        made.touch(0o600, exist_ok=False)
        made.write_text("\n".join([*lines, ""]))
        made.replace(file)
    except OSError as error:
        raise LdtError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        made.unlink(missing_ok=True)
    return replaced


def _own_lines(description: Description, site: str, keys: SiteKeys) -> dict[str, dict[str, str]]:
    """The values of each section. The edge, site of the first stage, dials the other one, which listens."""
    tunnel, other = tunnel_of(description), other_site(description, site)
    own, peer = (_host_route(description.sites[name].address) for name in (site, other))
    dials = site == description.site_of(0)
    sections = {"[Interface]": {"PrivateKey": keys.private, "Address": own, "MTU": str(tunnel.mtu)}}
    if not dials:
        sections["[Interface]"]["ListenPort"] = tunnel.endpoint.rpartition(":")[2]
    if keys.peer is not None:
        sections["[Peer]"] = {"PublicKey": keys.peer, "AllowedIPs": peer}
        if dials:
            sections["[Peer]"] |= {
                "Endpoint": tunnel.endpoint,
                "PersistentKeepalive": str(_KEEPALIVE_SECONDS),
            }
    return sections


def _updated(lines: list[str], own: dict[str, dict[str, str]], other: str) -> tuple[list[str], list[str]]:
    """Return ``lines`` with the ``own`` values, first in their sections, and the lines that had another value."""
    lines = lines or [_MARK, "[Interface]"]
    if "[Peer]" in own and "[Peer]" not in dict(_sections(lines, other)):
        lines = [*lines, "", f"# {other}", "[Peer]"]
    made: list[str] = []
    replaced = []
    for name, section in _sections(lines, other):
        made += section[:1]
        rest = section[1:]
        for key, value in own.get(name, {}).items():
            before = next((line for line in rest if _split(line)[0] == key.lower()), "")
            is_same = _split(before)[1] == value
            made.append(before if is_same else f"{key} = {value}")
            if before:
                rest.remove(before)
                replaced += [] if is_same else [before]
        made += rest
    return made, replaced


def _sections(lines: Sequence[str], other: str) -> list[tuple[str, list[str]]]:
    """The sections in order, each with its header. Those that the user added have no name, as what is before them."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        header = line.partition("#")[0].strip()
        if header.startswith("["):
            is_own = header == "[Interface]" or found[-1][1][-1:] == [f"# {other}"]
            found.append((header if is_own else "", []))
        found[-1][1].append(line)
    return found


def _values(section: Sequence[str]) -> dict[str, str]:
    """The first value of each key."""
    return dict(map(_split, reversed(section)))


def _split(line: str) -> tuple[str, str]:
    """The key, in lower case as WireGuard ignores that, and the value, without a comment."""
    key, _, value = line.partition("#")[0].partition("=")
    return key.strip().lower(), value.strip()


def _lines_of(file: Path) -> list[str]:
    """Raises LdtError for a file that cannot be read; none has no lines."""
    try:
        return read_file(file, _MAX_BYTES).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LdtError(f"{file} cannot be read: {error}") from error


def _host_route(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _is_key(text: str) -> bool:
    try:
        return len(text) == 44 and len(base64.b64decode(text, validate=True)) == 32
    except (binascii.Error, ValueError):
        return False


def _wg(command: str, given: str = "") -> str:
    if shutil.which("wg") is None:
        raise LdtError(f"wg is not installed, which makes the keys: {INSTALL}")
    try:
        done = subprocess.run(
            ["wg", command], input=given, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LdtError(f"wg {command} failed: {error}") from error
    return done.stdout.strip()
