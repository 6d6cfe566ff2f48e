"""Runs the same steps on the unsplit model in one process and compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

import ldt
from text.data import Corpus, Microbatch
from text.model import ByteModel, mean_loss, token_loss
from text.options import Options
from text.recipe import MAX_NORM, Recipe

__all__ = ["Checker"]

CHECKED_STEPS = 3
CLOSE = 1e-5  # of the largest element, where sums are made in another order: over the ranks of a stage, over replicas


class Unsplit:
    """The whole model, trained in plain PyTorch: what the pipeline must be equal to."""

    def __init__(self, options: Options, model: ByteModel) -> None:
        self.chunks = nn.Sequential(*(model.chunk(index) for index in range(model.num_chunks)))
        self._recipe = Recipe(self.chunks.parameters(), options.lr, options.steps)
        self._reduction = options.loss_reduction

    def step(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Accumulate the gradients of a step. Returns the mean loss of each microbatch."""
        step = self._step_of_sums if self._reduction == "token" else self._step_of_means
        return list(step(microbatches))

    def update(self) -> None:
        """Clip as ``ldt.clip_grad_norm_`` does, which adds up squares in double precision, and update the weights."""
        gradients = [parameter.grad for parameter in self.chunks.parameters() if parameter.grad is not None]
        squares = sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in gradients)
        scale = MAX_NORM / (squares**0.5 + 1e-6)
        if scale < 1:
            for grad in gradients:
                grad.mul_(scale)
        self._recipe.update()

    def _step_of_means(self, microbatches: Sequence[Microbatch]) -> Iterator[torch.Tensor]:
        for text, following in microbatches:
            loss = mean_loss(self.chunks(text), following)
            torch.autograd.backward(loss / len(microbatches))
            yield loss.detach()

    def _step_of_sums(self, microbatches: Sequence[Microbatch]) -> Iterator[torch.Tensor]:
        tokens = 0
        for text, following in microbatches:
            loss, count = token_loss(self.chunks(text), following)
            torch.autograd.backward(loss)
            tokens += count
            yield loss.detach() / count
        for parameter in self.chunks.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(tokens)


class Checker:
    """Compares the first steps of a pipeline with those of the unsplit model, which the first rank has.

    For this alone the gradients of all ranks are sent there, over the default process group. Bit for bit where sums
    are made in the same order; otherwise the first step alone, as an optimizer soon makes much of small differences.
    """

    def __init__(
        self, options: Options, pipeline: ldt.Pipeline, model: ByteModel, corpus: Corpus | None
    ) -> None:
        self._corpus = corpus
        self._microbatches = options.microbatches
        topology = pipeline.mesh.topology
        self._exact = set(topology.tp) == {1} and topology.dp == 1
        self._pipeline = pipeline
        self._mesh = pipeline.mesh
        self._unsplit = Unsplit(options, model) if self._mesh.rank == 0 else None

    def check(self, step: int, result: ldt.StepResult) -> None:
        """Compare a step, before its gradients are clipped. A collective call; past the first steps it does nothing.

        Prints the verdict. Raises SystemExit on every rank if anything differs.
        """
        if step >= (CHECKED_STEPS if self._exact else 1):
            return
        differences: list[str] = []
        ours = _gradients(
            self._pipeline.parameters()
        )  # of split layers whole, which all ranks of a stage do together
        if self._unsplit is None:
            dist.send(ours, dst=0)
        else:
            assert self._corpus is not None
            number = self._mesh.topology.edge_dp * self._microbatches
            differences += self._compare_losses(
                result, self._unsplit.step(self._corpus.training(step, number))
            )
            for rank in range(self._mesh.topology.world_size):
                differences += self._compare_gradients(rank, ours, self._unsplit)
            self._unsplit.update()
            verdict = "NOT equal" if differences else "bit-equal" if self._exact else "equal but for rounding"
            heading = f"check of step {step + 1}: losses and gradients are {verdict} to those of one process"
            tqdm.write("\n  ".join([heading, *differences]))
        if self._mesh.control.broadcast(len(differences), ldt.Node(0, 0)):
            raise SystemExit(1)

    def _compare_losses(self, result: ldt.StepResult, losses: Sequence[torch.Tensor]) -> Iterator[str]:
        assert result.losses is not None
        for index, (ours, theirs) in enumerate(zip(result.losses, losses[: len(result.losses)], strict=True)):
            if not self._are_equal(ours, theirs):
                yield f"microbatch {index}: loss {float(ours):.9g}, unsplit {float(theirs):.9g}"

    def _are_equal(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        largest = CLOSE * float(theirs.abs().max())
        return torch.equal(ours, theirs) if self._exact else float((ours - theirs).abs().max()) <= largest

    def _compare_gradients(self, rank: int, ours: torch.Tensor, unsplit: Unsplit) -> Iterator[str]:
        stage = self._mesh.topology.node_of(rank).stage
        named = [
            (f"chunk {chunk}, {name}", parameter)
            for chunk in self._mesh.topology.chunks_of(stage)
            for name, parameter in unsplit.chunks[chunk].named_parameters()
        ]
        theirs = _gradients(parameter for _, parameter in named)
        if rank != self._mesh.rank:
            ours = torch.empty_like(theirs)
            dist.recv(ours, src=rank)
        sizes = [parameter.numel() for _, parameter in named]
        for (name, _), mine, other in zip(
            named, torch.split(ours, sizes), torch.split(theirs, sizes), strict=True
        ):
            if not self._are_equal(mine, other):
                yield f"rank {rank}, {name}: gradients differ by up to {float((mine - other).abs().max()):.3g}"


def _gradients(parameters: Iterator[nn.Parameter]) -> torch.Tensor:
    """All gradients in one vector, so that one message carries a rank's."""
    gradients = [parameter.grad for parameter in parameters]
    assert all(grad is not None for grad in gradients), "every part of this model takes part in every step"
    return parameters_to_vector(
        grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients if grad is not None
    )
