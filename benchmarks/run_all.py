"""Runs every benchmark that fits the machine, one after the other, in under ten minutes on GPUs.

    python benchmarks/run_all.py --gpus 4 --out results
    python benchmarks/run_all.py --cpu

Each runs in its own process with a time limit; its output goes to NAME.txt in the folder, its rows to NAME.json. A
failure does not stop the others. The summary comes last; the exit code is 0 only if all of them ran and no data were
wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from two_hosts import remove_those_left, why_not_two_hosts

HERE = Path(__file__).parent
TAIL = 25  # lines of output to show after a failure


class Job(NamedTuple):
    """A benchmark with its options, the fewest GPUs it needs, and its time limit in seconds."""

    name: str
    command: str
    gpus: int = 0
    seconds: int = 120


class Outcome(NamedTuple):
    """``problem`` is empty on success."""

    job: Job
    seconds: float
    problem: str


ON_GPUS = [  # the most important first
    Job("p2p_overlap", "p2p_overlap.py", 2, 100),
    Job("host_overhead", "host_overhead.py", 2, 70),
    Job("recv_broadcast_2", "recv_broadcast.py --stage 2", 2, 80),
    Job("recv_broadcast_3", "recv_broadcast.py --stage 3", 4, 80),
    Job("step_time", "step_time.py", 2, 170),
    Job("transfer", "transfer.py", 4, 90),
    Job("transfer_link", "transfer.py --link 10Gbit --transports nccl --count 5", 4, 60),
    Job("step_time_link", "step_time.py --link 10Gbit --transports nccl --preset medium --steps 3", 2, 80),
    Job("metadata", "metadata.py", 1, 60),
    Job("compression", "compression.py", 1, 60),
    Job("random_weights", "random_weights.py", 1, 90),
    Job("llama_step", "llama_step.py", 2, 120),
    Job("llama_step_compiled", "llama_step.py --compile", 2, 180),
]
ON_CPU = [
    Job("p2p_overlap", "p2p_overlap.py --count 7 --latency-count 20"),
    Job("host_overhead", "host_overhead.py"),
    Job("recv_broadcast_2", "recv_broadcast.py --stage 2 --count 10"),
    Job("step_time", "step_time.py"),
    Job("slow_link", "slow_link.py --stages 2 3 --laps 1 --latency 0 10ms --forward 10ms"),
    Job("transfer", "transfer.py --count 10"),
    Job("transfer_link", "transfer.py --link 1Gbit --count 5"),
    Job("metadata", "metadata.py --count 20"),
    Job("compression", "compression.py --count 20"),
    Job("random_weights", "random_weights.py --layers 4"),
    Job("llama_step", "llama_step.py"),
]


def run_job(
    job: Job, options: list[str], folder: Path, limit: float, environment: Mapping[str, str]
) -> Outcome:
    """Run it until it ends or ``limit`` seconds have passed, when it and all its ranks are killed.

    Its output shows where the ranks were shortly before.
    """
    script, *its_options = job.command.split()
    command = [sys.executable, str(HERE / script), *its_options, *options]
    command += ["--json", str(folder / f"{job.name}.json"), "--stacks-after", str(0.75 * limit)]
    start = time.monotonic()
    with (folder / f"{job.name}.txt").open("w", encoding="utf-8") as output:
        output.write(f"# benchmarks/{' '.join([job.command, *options])}\n")
        output.flush()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
            problem = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # its process group may still have ranks
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(job, time.monotonic() - start, problem)


def run_jobs(jobs: list[Job], options: list[str], gpus: int, folder: Path, seconds: float) -> list[Outcome]:
    """Run all ``jobs`` within ``seconds``; those without time left report that as their problem."""
    environment = dict(os.environ)
    if gpus:  # each benchmark sees only these, as its settings depend on their number
        visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    deadline = time.monotonic() + seconds
    outcomes = []
    for job in jobs:
        left = deadline - time.monotonic()
        if left < 1:
            outcome = Outcome(job, 0.0, "not run: no time was left")
        else:
            outcome = run_job(job, options, folder, min(left, job.seconds), environment)
        print(line_of(outcome), flush=True)
        if outcome.seconds:
            text = (folder / f"{job.name}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            shown = text[-TAIL:] if outcome.problem else [line for line in text if " is left out: " in line]
            print("".join(f"    {line}\n" for line in shown), end="", flush=True)
        outcomes.append(outcome)
    return outcomes


def line_of(outcome: Outcome) -> str:
    return f"{outcome.job.name:<18} {outcome.seconds:>7.1f} s  {outcome.problem or 'ok'}"


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--gpus", type=int, help="how many to use; default: all")
    options.add_argument("--cpu", action="store_true", help="on the CPU, with small messages")
    options.add_argument("--out", type=Path, default=Path("benchmark-results"), metavar="FOLDER")
    options.add_argument("--only", nargs="+", metavar="NAME", help="of the benchmarks that fit")
    options.add_argument("--seconds", type=float, default=570, help="for all of them")
    given = options.parse_args()
    there = torch.cuda.device_count()
    gpus = 0 if given.cpu else there if given.gpus is None else given.gpus
    if not given.cpu and not 1 <= gpus <= there:
        options.error(f"expected GPUs to run on, got {gpus} of {there}: give --gpus 1 to {there}, or --cpu")
    jobs = [job for job in (ON_CPU if given.cpu else ON_GPUS) if job.gpus <= gpus]
    names = [job.name for job in jobs]
    unknown = set(given.only or ()) - set(names)
    if unknown:
        options.error(f"--only: expected names of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    jobs = [job for job in jobs if not given.only or job.name in given.only]
    reason = why_not_two_hosts()
    left_out = [job for job in jobs if reason and " --link " in job.command]
    for job in left_out:
        print(f"{job.name} is left out: {reason}")
        jobs.remove(job)
    given.out.mkdir(parents=True, exist_ok=True)
    common = ["--device", "cpu" if given.cpu else "cuda"]
    outcomes = run_jobs(jobs, common, gpus, given.out, given.seconds)
    if not reason:
        remove_those_left()
    good = sum(not outcome.problem for outcome in outcomes)
    summary = f"{good} of {len(outcomes)} ended well; output and rows are in {given.out}"
    (given.out / "summary.txt").write_text(
        "\n".join([*map(line_of, outcomes), summary, ""]), encoding="utf-8"
    )
    print(summary)
    return 0 if good == len(outcomes) and not (given.only and left_out) else 1


if __name__ == "__main__":
    sys.exit(main())
