"""Starts this site's ranks of the job that job.toml describes, and restarts them with those of the other sites."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
from pathlib import Path

from ldt.cli.units import limit
from ldt.errors import LdtError
from ldt.launch.description import Description, read
from ldt.launch.environment import exports

_ALL = -1  # --print-env without an index


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = "example: python -m ldt launch job.toml --site edge, and --site cloud on the other host"
    parser.add_argument("file", type=Path, metavar="FILE", help="the description, the same on all sites")
    parser.add_argument("--site", required=True, help="which of its sites this host is")
    parser.add_argument(
        "--max-restarts",
        type=_number,
        default=0,
        metavar="N",
        help="how often all sites start again after a failure, for the whole job (default: 0)",
    )
    parser.add_argument(
        "--grace",
        type=limit,
        default=10.0,
        metavar="SECONDS",
        help="from a failure or signal until ranks get SIGTERM, and from that to SIGKILL (default: 10)",
    )
    parser.add_argument(
        "--timeout",
        type=limit,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for launchers of other sites that are silent (default: 600)",
    )
    parser.add_argument(
        "--print-env",
        type=_number,
        nargs="?",
        const=_ALL,
        metavar="INDEX",
        help="start nothing; print what each rank of the site, or the one with this index in it, needs exported",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the ranks and return the exit status. Returns 2 and prints the error if the description is wrong."""
    try:
        description = read(arguments.file)
        description.check_site(arguments.site)
        if arguments.print_env is not None:
            index = None if arguments.print_env == _ALL else arguments.print_env
            print(exports(description, arguments.site, index))
            return 0
        _check_host(description, arguments.site)
    except LdtError as error:
        print(f"python -m ldt launch: {error}", file=sys.stderr)
        return 2
    from ldt.launch.supervisor import supervise

    return supervise(
        description,
        arguments.site,
        max_restarts=arguments.max_restarts,
        grace=arguments.grace,
        timeout=arguments.timeout,
    )


def _check_host(description: Description, site: str) -> None:
    """Raise LdtError if this host has not what the description says of ``site``."""
    table, ranks = description.sites[site], len(description.ranks_of(site))
    if not table.command and not description.script.is_file():
        raise LdtError(f"{description.path}: script must be a file, got {description.script}")
    interfaces = [name for _, name in socket.if_nameindex()]
    if table.interface not in interfaces:
        remedy = ": bring the tunnel up first, with wg-quick up" if description.tunnel else ""
        raise LdtError(
            f"{description.path}: [sites.{site}] interface must be one of {', '.join(interfaces)}, "
            f"got {table.interface!r}{remedy}"
        )
    if table.device != "cpu":
        found = _devices(table.device)
        if found < ranks:
            raise LdtError(
                f"{description.path}: [sites.{site}] has {ranks} ranks on device {table.device!r}, one for each, but "
                f"this host has {found}: with more hosts, start the ranks with --print-env"
            )


def _devices(kind: str) -> int:
    import torch

    if kind == "npu" and importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    module = getattr(torch, kind, None)
    return 0 if module is None else int(module.device_count())


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value
