"""Writes the weights of all stages of a checkpoint to one safetensors file that other tools can read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ldt.errors import LdtError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = "example: python -m ldt merge edge-disk/run cloud-disk/run model/model.safetensors"
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="given to save_checkpoint: together those of all stages",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("--step", type=int, help="default: the newest that is complete")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print its step. Returns 2 and prints the error if that fails."""
    from ldt import merge_checkpoint

    try:
        step = merge_checkpoint(arguments.paths, arguments.file, step=arguments.step)
    except (LdtError, ImportError) as error:
        print(f"python -m ldt merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote the weights of step {step} to {arguments.file}")
    return 0
