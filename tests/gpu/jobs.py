"""Runs jobs of two processes that may share a GPU, each with its own environment, and collects their output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["Said", "two_ranks"]

PREAMBLE = """
import json, os, sys
rank, folder = int(sys.argv[1]), sys.argv[2]
import ldt, torch, torch.distributed as dist
if torch.cuda.device_count() < 2:
    os.environ["NCCL_HOSTID"] = f"host {rank}"
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def say(what):
    print(json.dumps(what), flush=True)
"""


class Said(NamedTuple):
    """The output of a rank and its exit status; None if it was still running at the timeout."""

    output: str
    complaint: str
    status: int | None


def two_ranks(
    job: str, folder: Path, *arguments: str, seconds: float, **environment: str | None
) -> list[Said]:
    """Run ``job`` after PREAMBLE as two ranks, with ``arguments`` from ``sys.argv[3]`` on. None unsets a variable."""
    (script := folder / "job.py").write_text(PREAMBLE + job)
    variables = {**os.environ, **environment}
    given = {name: value for name, value in variables.items() if value is not None}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=given,
        )
        for rank in range(2)
    ]
    try:
        return [_said(process, seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def _said(process: subprocess.Popen[str], seconds: float) -> Said:
    try:
        output, complaint = process.communicate(timeout=seconds)
        return Said(output, complaint, process.returncode)
    except subprocess.TimeoutExpired:
        process.kill()
        output, complaint = process.communicate()
        return Said(output, complaint, None)
