"""The command line, ``python -m ldt COMMAND``: a table of commands, one module each.

A command module has ``configure(parser)``, which adds its arguments, and ``run(arguments) -> int``, which
returns the exit status. Modules are imported to build the parser, so they keep heavy imports (torch, matplotlib)
inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

COMMANDS = {
    "plan": ("ldt.cli.plan", "compare plans for your link and costs, draw and write the best"),
    "trace": ("ldt.cli.trace", "summarize the trace of a step"),
    "follow": ("ldt.cli.follow", "run a rank of the cloud without a script"),
    "launch": ("ldt.cli.launch", "start this site's ranks of a job on two sites"),
    "tunnel": ("ldt.cli.tunnel", "write this site's WireGuard file for a job on two sites"),
    "merge": ("ldt.cli.merge", "write a checkpoint of all stages as one safetensors file"),
    "doctor": ("ldt.cli.doctor", "show what is installed and built, and what is broken"),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The chosen command's ``run`` is the parsed ``run``."""
    parser = argparse.ArgumentParser(prog="python -m ldt", description="Layerwise disaggregated training.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 the command found a problem, 2 wrong usage.

    ``launch`` returns that of a rank that failed.
    """
    arguments = build_parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status
