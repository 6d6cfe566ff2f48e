"""Writes the weights of all stages of a checkpoint to one safetensors file that other tools can read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

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
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write; with --model a folder")
    parser.add_argument(
        "--model",
        help="folder or hub name of the Hugging Face model: write a folder that from_pretrained loads",
    )
    parser.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="hf.Settings of the training as JSON, for adapters to merge",
    )
    parser.add_argument("--step", type=int, help="default: the newest that is complete")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print its step. Returns 2 and prints the error if that fails."""
    from ldt import merge_checkpoint

    try:
        if arguments.model is None:
            step = merge_checkpoint(arguments.paths, arguments.file, step=arguments.step)
        else:
            step = _merge_model(arguments)
    except (LdtError, ImportError, ValueError, OSError) as error:
        print(f"python -m ldt merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote the weights of step {step} to {arguments.file}")
    return 0


def _merge_model(arguments: argparse.Namespace) -> int:
    from ldt.integrations import hf
    from ldt.untrusted import parse_file

    settings = None
    if arguments.settings is not None:
        settings = hf.Settings.from_json(parse_file(arguments.settings.read_bytes(), Any))
    return hf.save_pretrained(
        arguments.paths,
        arguments.model,
        arguments.file,
        adapter=None if settings is None else settings.adapter,
        step=arguments.step,
    )
