"""Writes the weights of all stages of a checkpoint to one safetensors file, as other tools read it."""

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
    """Write the file and say which step it is of; 2 with a sentence for what cannot be."""
    from ldt import merge_checkpoint

    try:
        step = merge_checkpoint(arguments.paths, arguments.file, step=arguments.step)
    except (LdtError, ImportError) as error:
        print(f"python -m ldt merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote the weights of step {step} to {arguments.file}")
    return 0
