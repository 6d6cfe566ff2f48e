"""Fine-tunes a causal language model from the Hugging Face hub in a U, on prompts and answers.

    torchrun --standalone --nproc-per-node 3 examples/finetune_hf.py --model FOLDER --data FILE.jsonl --lora 16

Every process runs this file and is a stage; each reads only the weights of its own layers. The data, the loss and the
first and last layers stay on the edge, stage 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from sft.data import Answers
from text.arguments import count, count_or_zero, positive
from text.launch import one_sentence_errors, one_sentence_errors_together, process_group, quiet_interrupt
from text.recipe import MAX_NORM, Recipe
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig

import ldt
import ldt.plan
from ldt.integrations import hf


class Options(argparse.Namespace):
    """The parsed command line."""

    model: str
    data: Path
    layers: list[int] | None
    lora: int
    steps: int
    microbatches: int
    batch: int
    longest: int
    lr: float
    seed: int
    output: Path | None


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # one core per process
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    topology = ldt.Topology([1] * stages)
    with quiet_interrupt(), process_group(stages):
        with one_sentence_errors():
            config = AutoConfig.from_pretrained(options.model)
            parts = hf.split(config, options.layers or evenly(config, stages + 1))
        with ldt.connect(topology) as mesh:
            with one_sentence_errors_together(mesh):
                chunks = load_chunks(options, parts, topology.chunks_of(mesh.stage))
                data = answers(options) if mesh.is_edge else None
            plan = ldt.plan.ushape(topology, options.microbatches)
            pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")
            train(options, pipeline, data)
        if options.output is not None:
            save(options, chunks, options.output / f"stage{mesh.stage}.safetensors")


def load_chunks(options: Options, parts: hf.Split, indices: Sequence[int]) -> list[hf.Chunk]:
    """Build this stage's part of the model. A config without weights gives random ones."""
    chunks = parts.build(indices)
    if Path(options.model).is_file():
        hf.init_weights(chunks, options.seed)
    else:
        hf.load_weights(chunks, options.model)
    if options.lora:
        lora = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
        hf.add_adapter(chunks, lora, seed=options.seed)
    return chunks


def answers(options: Options) -> Answers:
    data = Answers(options.data, options.model, options.batch, options.longest, options.seed)
    if data.left_out:
        print(f"{data.left_out} samples are left out: --longest {options.longest} cuts off all of the answer")
    return data


def train(options: Options, pipeline: ldt.Pipeline, data: Answers | None) -> None:
    """Run all steps: every rank makes the same calls, and only the edge passes microbatches."""
    trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
    recipe = Recipe(trained, options.lr, options.steps)
    with tqdm(total=options.steps, unit=" steps", disable=data is None) as bar:
        for step in range(options.steps):
            result = pipeline.step(data.next(options.microbatches) if data else None)
            ldt.clip_grad_norm_(trained, MAX_NORM, pipeline.mesh)
            recipe.update()
            if result.loss is not None:
                bar.set_postfix_str(f"loss {float(result.loss):.3f}", refresh=False)
                if step in (0, options.steps - 1):
                    print(
                        f"step {step + 1}: loss {float(result.loss):.3f} per token of an answer", flush=True
                    )
            bar.update()


def save(options: Options, chunks: list[hf.Chunk], file: Path) -> None:
    """Save the trained weights by their names in the whole model; the files of all stages are its checkpoint."""
    tensors = hf.state_dict(chunks)
    if options.lora:
        tensors = {
            name: tensor
            for chunk in chunks
            for name, tensor in get_peft_model_state_dict(chunk.model).items()
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


def evenly(config: PreTrainedConfig, chunks: int) -> list[int]:
    """The number of layers of each chunk."""
    layers: int = config.get_text_config().num_hidden_layers
    return [layers // chunks + (index < layers % chunks) for index in range(chunks)]


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="folder or hub name, or the file of a config: random weights, bytes as tokens",
    )
    add(
        "--data",
        type=Path,
        required=True,
        help='lines of {"prompt": "...", "answer": "..."}, blank ones are skipped; read by the edge',
    )
    add(
        "--layers",
        type=count_or_zero,
        nargs="+",
        help="number of layers of each chunk: one more than stages (default: even)",
    )
    add(
        "--lora",
        type=count_or_zero,
        default=0,
        metavar="RANK",
        help="train low-rank adapters; 0: all weights",
    )
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--microbatches", type=count, default=8, help="microbatches of a step")
    add("--batch", type=count, default=2, help="samples of a microbatch")
    add(
        "--longest",
        type=count,
        default=2048,
        help="tokens of a sample; what is longer is cut, or left out if no answer remains",
    )
    add("--lr", type=positive, default=2e-4, help="highest learning rate")
    add("--seed", type=int, default=1, help="of adapters, random weights and the order of samples")
    add("--output", type=Path, metavar="DIR", help="folder for what was trained, a file for each stage")
    return parser.parse_args(namespace=Options())


if __name__ == "__main__":
    main()
