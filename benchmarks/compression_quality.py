"""What does compression do to the gradients and to the loss of a model that trains?

The model of ``examples/train_text.py`` with its defaults (text, batches, recipe, cut), whole in one process: where a
tensor would cross between the edge and the cloud it is packed and unpacked by ldt. That is what the ranks of a job
compute (the tests compare both bit for bit). The microbatches of a step are one batch here, which changes the order of
sums and no block.

Rows of gradients, with the weights of some training steps without compression:

- ``own``    the variance of a minibatch's gradient over ``--minibatches`` minibatches, over its squared mean
- ``added``  the mean square of what rounding changes in it, over that variance

Rows of losses, after ``--steps`` steps with each of ``--seeds`` seeds (of weights, batches and held-out text):

- ``loss``     the mean loss on held-out text [nats per byte]
- ``over``     the mean difference to training without compression and the same seed
- ``+- 2 se``  two standard errors of that difference

Elements that are not finite count as wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from harness import Row, column, parse, parser, run
from picture import Picture
from torch import nn

import ldt
from ldt.runtime.comm.compression import CompressionChoice
from ldt.testing.rounding import with_rounding

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from text.data import Corpus, Microbatch
from text.model import ByteModel, mean_loss
from text.options import Options, parse_options
from text.recipe import MAX_NORM, Recipe

HELD_OUT = 64  # microbatches
FAR = 1_000_000  # steps from which the minibatches of the rows of gradients come


@dataclass(frozen=True)
class GradientRow:
    """The gradients of a training step's weights."""

    PICTURE: ClassVar[Picture] = Picture("scheme", ("added",), ("step",))
    step: int = column("step", ">6")
    scheme: str = column("scheme", "<7")
    own: float = column("own", ">9.3g")
    added: float = column("added", ">10.2e")
    wrong: int = column("#wrong", ">7")


@dataclass(frozen=True)
class LossRow:
    """The loss of all seeds."""

    PICTURE: ClassVar[Picture] = Picture("scheme", ("over",), ("seeds",))
    scheme: str = column("scheme", "<7")
    seeds: int = column("seeds", ">6")
    loss: float = column("loss", ">8.4f")
    over: float = column("over", ">9.4f")
    errors: float = column("+- 2 se", ">9.4f")
    wrong: int = column("#wrong", ">7")


class Job:
    """A model that trains, all chunks in one process."""

    def __init__(self, options: Options, scheme: CompressionChoice) -> None:
        topology = ldt.Topology(options.stages, laps=options.laps)
        recipe = ByteModel.of(options, topology)
        chunks = [recipe.chunk(index) for index in range(recipe.num_chunks)]
        self._options = options
        self._topology, self._chunks = topology, chunks
        self.model = self.with_scheme(scheme)
        self.corpus = Corpus.load(options)
        self._recipe = Recipe(self.model.parameters(), options.lr, options.steps)

    def with_scheme(self, scheme: CompressionChoice) -> nn.Sequential:
        """The model with the same weights and another compression."""
        return nn.Sequential(*with_rounding(self._topology, self._chunks, scheme))

    def batch(self, step: int) -> Microbatch:
        """The microbatches of a step as one."""
        return _joined(self.corpus.training(step, self._options.microbatches))

    def step(self, step: int) -> None:
        inputs, following = self.batch(step)
        torch.autograd.backward(mean_loss(self.model(inputs), following))
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._recipe.update()

    def held_out(self) -> float:
        """The loss on held-out text. Gradients are on, as only what requires one is packed."""
        inputs, following = _joined(self.corpus.held_out(HELD_OUT))
        return float(mean_loss(self.model(inputs), following).detach())


def gradient(model: nn.Module, batch: Microbatch) -> torch.Tensor:
    inputs, following = batch
    parts = torch.autograd.grad(mean_loss(model(inputs), following), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def gradients(job: Job, step: int, arguments: argparse.Namespace) -> Iterator[GradientRow]:
    """One row for each scheme, with the weights that ``job`` has."""
    batches = [job.batch(FAR + index) for index in range(arguments.minibatches)]
    plain = torch.stack([gradient(job.model, batch) for batch in batches])
    variance = float(plain.var(0).sum())
    own = variance / float(plain.mean(0).square().sum())
    for scheme in arguments.schemes:
        rounded = torch.stack([gradient(job.with_scheme(scheme), batch) for batch in batches])
        added = float((rounded - plain).square().sum(1).mean()) / variance
        yield GradientRow(step, scheme, own, added, wrong=int((~rounded.isfinite()).sum()))


def loss_after_training(options: Options, scheme: CompressionChoice) -> float:
    torch.set_num_threads(1)
    job = Job(options, scheme)
    for step in range(options.steps):
        job.step(step)
    return job.held_out()


def losses(arguments: argparse.Namespace) -> Iterator[LossRow]:
    """One row without compression, and one for each scheme."""
    schemes = ["none", *arguments.schemes]
    seeds = range(1, arguments.seeds + 1)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(arguments.processes, context) as pool:
        jobs = [
            [pool.submit(loss_after_training, options_of(arguments, seed), scheme) for seed in seeds]
            for scheme in schemes
        ]
        plain = [job.result() for job in jobs[0]]
        for scheme, of_seeds in zip(schemes, jobs, strict=True):
            found = [job.result() for job in of_seeds]
            over = [one - other for one, other in zip(found, plain, strict=True)]
            error = statistics.stdev(over) / len(over) ** 0.5
            wrong = int((~torch.tensor(found).isfinite()).sum())
            yield LossRow(scheme, len(found), statistics.mean(found), statistics.mean(over), 2 * error, wrong)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    job = Job(options_of(arguments, seed=1), "none")
    for step in range(max(arguments.at, default=-1) + 1):
        if step in arguments.at:
            yield from gradients(job, step, arguments)
        job.step(step)
    if arguments.seeds:
        yield from losses(arguments)


def options_of(arguments: argparse.Namespace, seed: int) -> Options:
    return parse_options(["--seed", str(seed), "--steps", str(arguments.steps)])


def _joined(microbatches: Sequence[Microbatch]) -> Microbatch:
    inputs, following = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
    return inputs, following


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0], transports=False)
    options.add_argument("--steps", type=int, default=500, help="of training")
    options.add_argument("--schemes", nargs="+", choices=("bf16", "8bit"), default=["bf16", "8bit"])
    options.add_argument("--at", type=int, nargs="*", default=[0, 60, 300], help="steps to look at gradients")
    options.add_argument("--minibatches", type=int, default=16, help="for the variance of a gradient")
    options.add_argument(
        "--seeds", type=int, default=5, help="for the loss on held-out text; 0: no such rows"
    )
    options.add_argument("--processes", type=int, default=1, help="that train with other seeds at once")
    given = parse(options, lambda given: 1)
    sys.exit(run(measure, given, f"{given.steps} steps, {given.seeds} seeds"))
