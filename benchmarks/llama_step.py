"""How long does a training step of a Llama take, against its simulation, torch's 1F1B of two halves, and one GPU alone?

A random Llama in bfloat16 on two ranks: the edge has the first and last layers, the cloud those between. Paths:

- ``ldt optimize, <transport>``  the plan from measured costs, over lanes of each transport
- ``torch 1F1B, halves``  torch.distributed.pipelining with half of the layers on each rank
- ``one rank alone``  all layers on rank 0, microbatch after microbatch

As in step_time.py ``measured`` is the median on the slowest rank; paths alternate, and gradients of the first and last
step are compared with those of the unsplit model. ``#wrong`` counts elements that differ by more than 1/16 of the
largest in their tensor (in bfloat16 sums of another order differ). With ``--compile`` layers are compiled everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from bounces import Bounces
from harness import Row, parse, parser, run
from step_time import StepPath, measured_costs, rows_of
from torch import nn
from torch_pipelines import step_in_a_row
from transformers import LlamaConfig
from transports import connect_each, device_of, note

import ldt
from ldt.integrations import hf
from ldt.plan import Plan, optimize, simulate

TOLERANCE = 1 / 16
SIZES = {
    "cuda": (4096, 11008, 32000, 4096),
    "cpu": (64, 128, 256, 32),
}  # width, inner width, vocabulary, sequence
Inputs = dict[str, torch.Tensor]


def config_of(arguments: argparse.Namespace) -> LlamaConfig:
    width, inner, vocabulary, sequence = SIZES[arguments.device]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=sum(arguments.layers),
        num_attention_heads=width // 128 or 2,
        num_key_value_heads=max(1, width // 512),
        vocab_size=vocabulary,
        max_position_embeddings=sequence,
    )


class Llama:
    """The same random weights in any cut, a step's microbatches, and the expected gradients by name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.config, self.device = config_of(arguments), device_of(arguments)
        self._compiles = arguments.compile
        *_, vocabulary, sequence = SIZES[arguments.device]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (arguments.microbatches, 1, sequence), generator=generator)
        self.microbatches = [({"input_ids": ids}, ids) for ids in tokens.to(self.device)]
        self.whole = self.chunks(arguments.layers, range(len(arguments.layers)))
        self._kept = list(self.whole)
        self.step_alone()
        self._truth = {name: p.grad for chunk in self.whole for name, p in chunk.model.named_parameters()}
        self._truth = {name: None if grad is None else grad.clone() for name, grad in self._truth.items()}
        self.forget()

    def chunks(self, layers: Sequence[int], indices: Sequence[int]) -> list[hf.Chunk]:
        made = hf.split(self.config, layers).build(indices, self.device, torch.bfloat16)
        hf.init_weights(made, seed=0)
        for chunk in made if self._compiles else ():
            for layer in chunk.model.model.layers:
                if next(layer.parameters(), None) is not None:
                    layer.compile()
        return made

    def keep(self, chunks: list[hf.Chunk]) -> list[hf.Chunk]:
        """Clear the gradients of ``chunks`` in ``forget``, too."""
        self._kept += chunks
        return chunks

    def forget(self) -> None:
        for chunk in self._kept:
            chunk.zero_grad()

    def step_alone(self) -> None:
        """Run a step of the unsplit model."""
        tokens = 0
        for inputs, labels in self.microbatches:
            output = self.whole[0](**inputs)
            for chunk in self.whole[1:]:
                output = chunk(output)
            loss, count = hf.token_loss(output, labels)
            torch.autograd.backward(loss)
            tokens += int(count)
        for chunk in self.whole:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)

    def compare(self, modules: Sequence[nn.Module]) -> tuple[int, int]:
        """Return how many gradient elements differ from the unsplit model's, and how many are wrong."""
        unequal = wrong = 0
        for chunk in modules:
            assert isinstance(chunk, hf.Chunk)
            for name, parameter in chunk.model.named_parameters():
                expected = self._truth[name]
                assert expected is not None
                got = torch.full_like(expected, torch.nan) if parameter.grad is None else parameter.grad
                off = (got - expected).abs()
                unequal += int((off != 0).sum())
                wrong += int((~(off <= TOLERANCE * expected.abs().max())).sum())
        return unequal, wrong


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    topology = ldt.Topology([1, 1])
    meshes = connect_each(topology, arguments)
    try:
        model = Llama(arguments)
        number = sum(parameter.numel() for chunk in model.whole for parameter in chunk.parameters())
        note(f"{number / 1e9:.2f} billion parameters, layers {arguments.layers}")
        text = f"llama {arguments.layers} M{arguments.microbatches}" + (
            " compiled" if arguments.compile else ""
        )
        yield from rows_of(text, model, paths_of(model, meshes, arguments), arguments.steps, model.device)
    finally:
        for mesh in meshes.values():
            mesh.close()


def paths_of(model: Llama, meshes: Mapping[str, ldt.Mesh], arguments: argparse.Namespace) -> list[StepPath]:
    mesh = list(meshes.values())[-1]
    chunks = model.keep(model.chunks(arguments.layers, mesh.topology.chunks_of(mesh.stage)))
    batch = model.microbatches if mesh.is_edge else None
    costs = measured_costs(pipeline_of(chunks, mesh, None), batch)
    plan = optimize(mesh.topology, len(model.microbatches), costs)
    paths = [
        StepPath(
            f"ldt optimize, {name}",
            partial(pipeline_of(chunks, each, plan).step, batch),
            simulate(plan, costs).makespan,
            chunks,
            Bounces(each.all_lanes()),
        )
        for name, each in meshes.items()
    ]
    count = sum(arguments.layers)
    half = model.keep(model.chunks([count // 2, count - count // 2], [mesh.rank]))
    plain = [(inputs["input_ids"], labels) for inputs, labels in model.microbatches]
    halves = step_in_a_row(half[0], plain, mean_loss)
    alone = (model.step_alone, model.whole) if mesh.rank == 0 else (lambda: None, [])
    return [
        *paths,
        StepPath("torch 1F1B, halves", halves, None, half, Bounces([])),
        StepPath("one rank alone", alone[0], None, alone[1], Bounces([])),
    ]


def pipeline_of(chunks: Sequence[nn.Module], mesh: ldt.Mesh, plan: Plan | None) -> ldt.Pipeline:
    return ldt.Pipeline(
        chunks,
        mesh,
        plan,
        hf.token_loss if mesh.is_edge else None,
        loss_reduction="token",
        check_weights=False,
    )


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss, count = hf.token_loss(logits, labels)
    return loss / count


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, nargs=3, default=[3, 6, 3], help="of head, cloud and tail")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--compile", action="store_true", help="compile layers")
    options.add_argument("--steps", type=int, default=5, help="counted steps of each path")
    given = parse(options, lambda _: 2)
    sys.exit(run(measure, given, "two ranks, bfloat16, first and last layers on stage 0"))
