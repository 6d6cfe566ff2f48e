"""Two sites on one host, to try what is meant for two: network namespaces with an emulated wide-area link.

    python benchmarks/two_sites.py                      holds the link until Ctrl-C
    python benchmarks/two_sites.py enter edge           a shell at the edge, or a command; also: enter cloud
    python benchmarks/two_sites.py pull 20              takes the link down for 20 seconds

One at a time on a host. Needs what ``wan_link`` needs, so root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from two_hosts import Place
from wan_link import ADDRESSES, DEVICE, Link, Settings, wide_area_link

from ldt.cli.units import bandwidth, limit, seconds

SITES = ("edge", "cloud")
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STATE = Path("/run/ldt-two-sites.json")  # of the link that is held


def main() -> int:
    options = parse_options()
    try:
        run(options)
    except ModuleNotFoundError as error:
        print(f"two_sites.py: {error}: pip install {error.name}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"two_sites.py: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    if options.action == "enter":
        enter(options.site, options.command)
    elif options.action == "pull":
        pull(options.seconds)
    else:
        hold(Settings(options.rate, options.round_trip / 2))


def hold(settings: Settings) -> None:
    """Keep the sites until a signal comes."""
    found = _state()
    if found is not None:
        raise ValueError(f"process {found['pid']} holds a link already: end it, or use its sites")
    with wide_area_link(settings) as link:
        namespaces = [place.namespace for place in link.places]
        state = {"pid": os.getpid(), "namespaces": namespaces, "control": link.control}
        STATE.write_text(json.dumps(state))
        # Not before: pyroute2 ends processes by SIGTERM that it forks from this one.
        before = {number: signal.signal(number, signal.default_int_handler) for number in _ENDS}
        try:
            for site, address in zip(SITES, ADDRESSES, strict=True):
                print(f"{site}: {address}", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            STATE.unlink()


def enter(site: str, command: list[str]) -> None:
    """Become the command there."""
    from pyroute2 import netns

    words = command or [os.environ.get("SHELL", "sh")]
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"there is no command {words[0]}")
    netns.setns(held().places[SITES.index(site)].namespace, flags=0)
    os.execvp(words[0], words)


def pull(duration: float) -> None:
    """Take the link down, and bring it up again also after Ctrl-C."""
    link = held()
    try:
        for direction in (0, 1):
            link.set(direction, cut=1)
        time.sleep(duration)
    finally:
        for direction in (0, 1):
            link.set(direction, cut=0)


def held() -> Link:
    """The link that another process holds."""
    found = _state()
    if found is None:
        raise ValueError(
            "there are no sites: start python benchmarks/two_sites.py first, and leave it running"
        )
    edge, cloud = (Place(namespace, DEVICE) for namespace in found["namespaces"])
    return Link((edge, cloud), found["control"])


def _state() -> dict[str, Any] | None:
    """What the process that holds a link has written, unless it was killed since."""
    found: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {"pid": 0}
    return found if Path(f"/proc/{found['pid']}").exists() else None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", type=bandwidth, default="200Mbit", help="of each direction (default: 200Mbit)"
    )
    parser.add_argument("--round-trip", type=seconds, default="20ms", help="of a packet (default: 20ms)")
    actions = parser.add_subparsers(dest="action")
    entered = actions.add_parser("enter", help="run a command at a site")
    entered.add_argument("site", choices=SITES)
    entered.add_argument("command", nargs=argparse.REMAINDER, help="default: a shell")
    pulled = actions.add_parser("pull", help="take the link down for a while")
    pulled.add_argument("seconds", type=limit)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
