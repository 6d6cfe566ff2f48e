"""Writes this site's file for wg-quick, with a fresh key, and prints the site's public key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ldt.errors import LdtError
from ldt.launch.description import Description, read
from ldt.launch.tunnel import SiteKeys, check_key, other_site, tunnel_of, write_file


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = (
        "example: at the edge python -m ldt tunnel job.toml --site edge, in the cloud the command that it prints, "
        "and at the edge the one printed there. The private key never leaves the file."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the description, the same on both sites")
    parser.add_argument("--site", required=True, help="which of its sites this host is")
    parser.add_argument("--peer", metavar="KEY", help="public key that the other site printed")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where INTERFACE.conf is written (default: here); its key and lines that you added are kept",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns 2 and prints the error if the description or a key is wrong."""
    try:
        description = read(arguments.file)
        description.check_site(arguments.site)
        file = arguments.folder / f"{description.sites[arguments.site].interface}.conf"
        public, has_peer = _write(file, description, arguments.site, arguments.peer)
    except LdtError as error:
        print(f"python -m ldt tunnel: {error}", file=sys.stderr)
        return 2
    other = other_site(description, arguments.site)
    print(f"wrote {file}; the public key of {arguments.site}:", file=sys.stderr)
    print(public, flush=True)
    print(
        f"for {other}: python -m ldt tunnel {arguments.file} --site {other} --peer {public}", file=sys.stderr
    )
    if has_peer:
        shown = file if file.is_absolute() else f"./{file}"
        print(f"then, as root: wg-quick up {shown}", file=sys.stderr)
    else:
        print(f"then give this command --peer with the public key of {other}", file=sys.stderr)
    return 0


def _write(file: Path, description: Description, site: str, peer: str | None) -> tuple[str, bool]:
    """Return the site's public key, and whether the file has that of the other site."""
    tunnel_of(description)
    keys = SiteKeys.in_file(file, other_site(description, site))
    public = keys.public
    if peer is not None:
        keys = SiteKeys(keys.private, check_key(peer))
    if keys.peer == public:
        raise LdtError(f"--peer {public} is the key of {site} itself: give that of the other site")
    for line in write_file(file, description, site, keys):
        print(f"replaced in {file}: {line}", file=sys.stderr)
    return public, keys.peer is not None
