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
CLOSE = 1e-5  # of the largest element, where ranks of a stage or replicas sum in another order


class Unsplit:
    """The whole model, trained in plain PyTorch: the reference for the pipeline."""

    def __init__(self, options: Options, model: ByteModel, device: torch.device) -> None:
        self.chunks = nn.Sequential(*(model.chunk(index) for index in range(model.num_chunks))).to(device)
        self._recipe = Recipe(self.chunks.parameters(), options.lr, options.steps)
        self._reduction = options.loss_reduction

    def step(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Accumulate the gradients of a step. Returns the mean loss of each microbatch."""
        step = self._step_of_sums if self._reduction == "token" else self._step_of_means
        return list(step(microbatches))

    def update(self) -> None:
        """Clip as ``ldt.clip_grad_norm_``, which sums squares in double precision, and update the weights."""
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
    """Compares the first steps of a pipeline with those of the unsplit model, which is on the first rank.

    For this alone the gradients of all ranks are sent there, over the default process group. Bit for bit where sums
    are made in the same order; otherwise the first step alone, as an optimizer soon makes much of small differences.
    On an NPU, too, which has no double precision for the norm of the gradients.
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
        same_weights = self._exact and self._mesh.device.type in ("cpu", "cuda")
        self._steps = CHECKED_STEPS if same_weights else 1
        self._unsplit = Unsplit(options, model, self._mesh.device) if self._mesh.rank == 0 else None

    def check(self, step: int, result: ldt.StepResult) -> None:
        """Compare a step before its gradients are clipped. A collective call; does nothing after the first steps.

        Prints the verdict. Raises SystemExit on every rank if anything differs.
        """
        if step >= self._steps:
            return
        differences: list[str] = []
        actual = _gradients(
            self._pipeline.parameters()
        )  # sharded ones whole, which is collective over the stage
        if self._unsplit is None:
            dist.send(actual, dst=0)
        else:
            assert self._corpus is not None
            number = self._mesh.topology.edge_dp * self._microbatches
            differences += self._compare_losses(
                result, self._unsplit.step(self._corpus.training(step, number))
            )
            for rank in range(self._mesh.topology.world_size):
                differences += self._compare_gradients(rank, actual, self._unsplit)
            self._unsplit.update()
            verdict = "NOT equal" if differences else "bit-equal" if self._exact else "equal but for rounding"
            heading = f"check of step {step + 1}: losses and gradients are {verdict} to those of one process"
            tqdm.write("\n  ".join([heading, *differences]))
        if self._mesh.control.broadcast(len(differences), ldt.Node(0, 0)):
            raise SystemExit(1)

    def _compare_losses(self, result: ldt.StepResult, losses: Sequence[torch.Tensor]) -> Iterator[str]:
        assert result.losses is not None
        for index, (actual, expected) in enumerate(
            zip(result.losses, losses[: len(result.losses)], strict=True)
        ):
            if not self._are_equal(actual, expected):
                yield f"microbatch {index}: loss {float(actual):.9g}, unsplit {float(expected):.9g}"

    def _are_equal(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        if self._exact:
            return torch.equal(actual, expected)
        return float((actual - expected).abs().max()) <= CLOSE * float(expected.abs().max())

    def _compare_gradients(self, rank: int, actual: torch.Tensor, unsplit: Unsplit) -> Iterator[str]:
        stage = self._mesh.topology.node_of(rank).stage
        named = [
            (f"chunk {chunk}, {name}", parameter)
            for chunk in self._mesh.topology.chunks_of(stage)
            for name, parameter in unsplit.chunks[chunk].named_parameters()
        ]
        expected = _gradients(parameter for _, parameter in named)
        if rank != self._mesh.rank:
            actual = torch.empty_like(expected)
            dist.recv(actual, src=rank)
        sizes = [parameter.numel() for _, parameter in named]
        for (name, _), part, reference in zip(
            named, torch.split(actual, sizes), torch.split(expected, sizes), strict=True
        ):
            if not self._are_equal(part, reference):
                yield f"rank {rank}, {name}: gradients differ by up to {float((part - reference).abs().max()):.3g}"


def _gradients(parameters: Iterator[nn.Parameter]) -> torch.Tensor:
    """Flatten all gradients into one vector on the CPU, which one message carries."""
    gradients = [parameter.grad for parameter in parameters]
    assert all(grad is not None for grad in gradients), "every part of this model takes part in every step"
    return parameters_to_vector(
        grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients if grad is not None
    ).cpu()
