"""The file that wg-quick takes for one site of a tunnel. WireGuard's own ``wg`` makes the keys."""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import subprocess
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
    def in_file(cls, file: Path) -> SiteKeys:
        """The keys in ``file``, or a fresh one if there is no file. Raises LdtError for a file of somebody else."""
        try:
            lines = read_file(file, _MAX_BYTES).decode().splitlines()
        except FileNotFoundError:
            return cls(_wg("genkey"))
        except (OSError, ValueError) as error:
            raise LdtError(f"{file} cannot be read: {error}") from error
        values = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
        private = values.get("PrivateKey", "")
        if lines[:1] != [_MARK] or not _is_key(private):
            raise LdtError(f"{file} was not written by this command: move it away, or give another --folder")
        return cls(private, values.get("PublicKey"))

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


def write_file(file: Path, description: Description, site: str, keys: SiteKeys) -> None:
    """Write the file, which only its owner may read."""
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        made.touch(0o600, exist_ok=False)
        made.write_text(_text(description, site, keys))
        made.replace(file)
    except OSError as error:
        raise LdtError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        made.unlink(missing_ok=True)


def _text(description: Description, site: str, keys: SiteKeys) -> str:
    """The edge, site of the first stage, dials the other one, which listens."""
    tunnel, other = tunnel_of(description), other_site(description, site)
    own, peer = (_host_route(description.sites[name].address) for name in (site, other))
    dials = site == description.site_of(0)
    lines = [_MARK, "[Interface]", f"PrivateKey = {keys.private}", f"Address = {own}", f"MTU = {tunnel.mtu}"]
    if not dials:
        lines.append(f"ListenPort = {tunnel.endpoint.rpartition(':')[2]}")
    if keys.peer is not None:
        lines += ["", f"# {other}", "[Peer]", f"PublicKey = {keys.peer}", f"AllowedIPs = {peer}"]
        if dials:
            lines += [f"Endpoint = {tunnel.endpoint}", f"PersistentKeepalive = {_KEEPALIVE_SECONDS}"]
    return "\n".join([*lines, ""])


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
