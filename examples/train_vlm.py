"""Trains a small Qwen2.5-VL in a U to name the digit in an image.

    torchrun --standalone --nproc-per-node 3 examples/train_vlm.py

Two laps: first the vision tower is walked through over all stages, then the language model. Every process runs this
file; images, questions, answers and the loss stay on the edge, stage 0. Each process is a stage.
"""

from __future__ import annotations

import argparse
import os

import torch
from text.arguments import count, positive
from text.launch import one_sentence_errors, process_group, quiet_interrupt
from text.recipe import MAX_NORM, Recipe
from tqdm import tqdm
from vlm.digits import Digits, Microbatch
from vlm.model import layers_of_chunks, small_config
from vlm.words import IMAGE

import ldt
import ldt.plan
from ldt.integrations import hf

EVALUATED = 4  # times the microbatches of a step


class Options(argparse.Namespace):
    """The parsed command line."""

    steps: int
    microbatches: int
    batch: int
    lr: float
    seed: int


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # one core per process
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    topology = ldt.Topology([1] * stages, laps=2)
    with quiet_interrupt(), process_group(stages):
        with one_sentence_errors():
            parts = hf.split(small_config(), layers_of_chunks(stages), laps=2)
        with ldt.connect(topology) as mesh:
            chunks = parts.build(topology.chunks_of(mesh.stage))
            hf.init_weights(chunks, options.seed)
            plan = ldt.plan.ushape(topology, options.microbatches)
            pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")
            digits = Digits(parts.config, options.batch, options.seed) if mesh.is_edge else None
            report("before", options, pipeline, digits)
            train(options, pipeline, digits)
            report("after", options, pipeline, digits)


def train(options: Options, pipeline: ldt.Pipeline, digits: Digits | None) -> None:
    """Run all steps: every rank makes the same calls, and only the edge passes microbatches."""
    recipe = Recipe(pipeline.parameters(), options.lr, options.steps)
    with tqdm(total=options.steps, unit=" steps", disable=digits is None) as bar:
        for step in range(options.steps):
            result = pipeline.step(digits.training(step, options.microbatches) if digits else None)
            ldt.clip_grad_norm_(pipeline.parameters(), MAX_NORM, pipeline.mesh)
            recipe.update()
            if result.loss is not None:
                bar.set_postfix_str(f"loss {float(result.loss):.3f}", refresh=False)
            bar.update()


def report(when: str, options: Options, pipeline: ldt.Pipeline, digits: Digits | None) -> None:
    """Print the accuracy on held-out digits. A collective call."""
    microbatches = digits.held_out(EVALUATED * options.microbatches) if digits else None
    result = pipeline.eval(microbatches)
    if microbatches is None or result.outputs is None:
        return
    right: dict[str, list[bool]] = {"with images": [], "without images": []}
    for microbatch, logits in zip(microbatches, result.outputs, strict=True):
        for kind, answers in answered(microbatch, logits).items():
            right[kind] += answers
    shares = (f"{kind} {sum(answers) / max(1, len(answers)):.0%}" for kind, answers in right.items())
    print(f"accuracy {when} training: {', '.join(shares)}", flush=True)


def answered(microbatch: Microbatch, logits: torch.Tensor) -> dict[str, list[bool]]:
    """Whether the answer of each sample, its last token, is the most likely one."""
    inputs, labels = microbatch
    right = logits[:, -2].argmax(-1) == labels[:, -1]
    shown = (inputs["input_ids"] == IMAGE).any(-1)
    return {"with images": right[shown].tolist(), "without images": right[~shown].tolist()}


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=count, default=400, help="optimizer steps")
    parser.add_argument(
        "--microbatches", type=count, default=4, help="microbatches of a step; a fourth has no images"
    )
    parser.add_argument("--batch", type=count, default=16, help="samples of a microbatch")
    parser.add_argument("--lr", type=positive, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the samples")
    return parser.parse_args(namespace=Options())


if __name__ == "__main__":
    main()
