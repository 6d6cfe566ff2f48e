"""Trains a small Qwen2.5-VL in a U to name the digit in an image.

    torchrun --standalone --nproc-per-node 3 examples/train_vlm.py

Two laps: first the vision tower is walked through over all stages, then the language model. Every process runs this
file; images, questions, answers and the loss stay on the edge, stage 0. Each process is a stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from text.device import Device, select_device
from text.launch import one_sentence_errors, one_sentence_errors_together, process_group, quiet_interrupt
from text.recipe import Recipe
from tqdm import tqdm
from transformers import PreTrainedConfig
from vlm.digits import Digits, Microbatch
from vlm.model import layers_of_chunks, small_config
from vlm.options import Options, parse_options
from vlm.words import IMAGE

import ldt
import ldt.plan
from ldt.integrations import hf

EVALUATED = 4  # times the microbatches of a step

Log = Callable[[ldt.StepResult, int], None]


def main() -> None:
    options = parse_options()
    with one_sentence_errors():
        device = select_device(options.device)
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    topology = ldt.Topology([1] * stages, laps=2)
    with quiet_interrupt(), process_group(stages, device.backends):
        with one_sentence_errors():
            parts = hf.split(small_config(), layers_of_chunks(stages), laps=2)
        with ldt.connect(topology, device.backend, device=device.device) as mesh:
            run(options, device, parts, mesh)


def run(options: Options, device: Device, parts: hf.Split, mesh: ldt.Mesh) -> None:
    with one_sentence_errors_together(mesh):
        log = open_log(options.tensorboard if mesh.rank == 0 else None)
    chunks = parts.build(mesh.topology.chunks_of(mesh.stage), device=mesh.device)
    hf.init_weights(chunks, options.seed)
    plan = ldt.plan.ushape(mesh.topology, options.microbatches)
    pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")
    digits = Digits(parts.config, options.batch, options.seed, device) if mesh.is_edge else None
    with device.autocast(options.dtype):
        train(options, pipeline, digits, log)
    if options.output is not None and mesh.rank == 0:
        merge(options, parts.config, options.output)


def train(options: Options, pipeline: ldt.Pipeline, digits: Digits | None, log: Log) -> None:
    """Run the steps that are left: every rank makes the same calls, and only the edge passes microbatches."""
    recipe = Recipe(pipeline.parameters(), options.lr, options.steps)
    with one_sentence_errors():
        done = load(options, pipeline, recipe)
    report("before training", options, pipeline, digits)
    with tqdm(total=options.steps, initial=done, unit=" steps", disable=digits is None) as bar:
        for step in range(done + 1, options.steps + 1):
            result = pipeline.step(digits.training(step - 1, options.microbatches) if digits else None)
            if options.clip:
                ldt.clip_grad_norm_(pipeline.parameters(), options.clip, pipeline.mesh)
            recipe.update()
            log(result, step)
            if result.loss is not None:
                bar.set_postfix_str(f"loss {float(result.loss):.3f}", refresh=False)
            bar.update()
            if step % options.save_every == 0 or step == options.steps:
                save(options, pipeline, recipe, step)
            if options.eval_every and step % options.eval_every == 0 and step < options.steps:
                report(f"after {step} steps", options, pipeline, digits)
    report("after training", options, pipeline, digits)


def load(options: Options, pipeline: ldt.Pipeline, recipe: Recipe) -> int:
    """Load the newest checkpoint, if there is one. Returns the number of steps that are done."""
    if options.checkpoints is None:
        return 0
    state = ldt.load_checkpoint(options.checkpoints, pipeline, recipe.optimizer, extra=recipe.extra)
    if state is None:
        return 0
    if pipeline.mesh.rank == 0:
        print(f"{state.step} of {options.steps} steps were done before", flush=True)
    return state.step


def save(options: Options, pipeline: ldt.Pipeline, recipe: Recipe, step: int) -> None:
    if options.checkpoints is not None:
        ldt.save_checkpoint(options.checkpoints, pipeline, recipe.optimizer, step=step, extra=recipe.extra)


def merge(options: Options, config: PreTrainedConfig, folder: Path) -> None:
    """Write the layers of all stages into one model, which from_pretrained reads."""
    assert options.checkpoints is not None
    config.save_pretrained(folder)
    step = ldt.merge_checkpoint(options.checkpoints, folder / "model.safetensors")
    print(f"wrote the model after {step} steps to {folder}", flush=True)


def open_log(folder: Path | None) -> Log:
    """Return what writes the scalars of a step for TensorBoard, or nothing without a folder."""
    if folder is None:
        return lambda result, step: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs TensorBoard: pip install '.[examples]'") from error
    writer = SummaryWriter(folder)

    def log(result: ldt.StepResult, step: int) -> None:
        for name, value in ldt.scalars(result).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


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
    print(f"accuracy {when}: {', '.join(shares)}", flush=True)


def answered(microbatch: Microbatch, logits: torch.Tensor) -> dict[str, list[bool]]:
    """Whether the answer of each sample, its last token, is the most likely one."""
    inputs, labels = microbatch
    right = logits[:, -2].argmax(-1) == labels[:, -1]
    shown = (inputs["input_ids"] == IMAGE).any(-1)
    return {"with images": right[shown].tolist(), "without images": right[~shown].tolist()}


if __name__ == "__main__":
    main()
