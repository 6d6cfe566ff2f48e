"""Starts and ends a job of many processes: process group, command-line errors, Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

import ldt

__all__ = ["one_sentence_errors", "one_sentence_errors_together", "process_group", "quiet_interrupt"]

INTERRUPTED = 128 + signal.SIGINT  # exit status that a shell reports for Ctrl-C


@contextmanager
def process_group(ranks: int, backend: str = "gloo") -> Iterator[None]:
    """The default process group, under a launcher. A job of one rank needs none."""
    if "RANK" in os.environ:  # a launcher started this
        dist.init_process_group(backend)
    elif ranks > 1:
        sys.exit(
            f"this needs {ranks} processes: torchrun --standalone --nproc-per-node {ranks} {sys.argv[0]}"
        )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """End the process with the text of the error, without a traceback, if the command line is wrong."""
    try:
        yield
    except (OSError, ValueError, ImportError, ldt.LdtError) as error:
        _say(f"{sys.argv[0]}: {error}")
        sys.exit(1)


@contextmanager
def one_sentence_errors_together(mesh: ldt.Mesh) -> Iterator[None]:
    """As ``one_sentence_errors`` where other ranks must end, too: they learn that one failed, but not its error.

    A collective call: every rank comes to it, whether it has something to do inside or not.
    """
    problem: object = None
    try:
        yield
    except (OSError, ValueError, ldt.LdtError) as error:
        problem = error
    (failed,) = mesh.control.sum([problem is not None])
    if failed:
        sentence = problem or "another rank cannot go on and says why"
        # Printed now: torchrun kills the remaining workers when one exits.
        _say(f"{sys.argv[0]}: {sentence}")
        sys.exit(1)


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Let Ctrl-C, here or on another rank, end the process without a traceback after clean-up."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except (KeyboardInterrupt, ldt.RemoteStageError) as error:
        if isinstance(error, ldt.RemoteStageError) and error.error_type != KeyboardInterrupt.__name__:
            raise
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", flush=True)
        os._exit(INTERRUPTED)  # a normal exit may take seconds on a busy machine


def _say(line: str) -> None:
    """Print in one write, so that lines of several ranks do not mix."""
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), f"{line}\n".encode())


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
    logging.disable()  # every rank knows why the others stop
    raise KeyboardInterrupt
