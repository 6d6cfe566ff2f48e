"""Fine-tunes a causal language model from the Hugging Face hub in a U.

    torchrun --standalone --nproc-per-node 3 examples/finetune_hf.py --model FOLDER --data.path FILE.jsonl

Every process is a stage and reads only the weights of its own layers. The data, the loss and the first and last layers
stay on the edge, stage 0, which alone has a training loop. Ranks of the cloud may run `python -m ldt follow` instead.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from sft.batches import Batches
from sft.options import Options, parse_options
from sft.samples import read_samples
from sft.tokens import Tokenizer, load_tokenizer, tokenize
from sft.train import Training
from text.device import select_device
from text.launch import one_sentence_errors, process_group, quiet_interrupt
from transformers import AutoConfig

import ldt
from ldt.integrations import hf


def main() -> None:
    options = parse_options()
    with one_sentence_errors():
        job = ldt.Job.from_env() if "LDT_JOB" in os.environ else None
        topology = ldt.Topology([1] * int(os.environ.get("WORLD_SIZE", "1"))) if job is None else job.topology
        place = select_device(options.device if job is None else job.device.type)
        checkpoints = None
        if options.output is not None:
            checkpoints = options.output / "checkpoints" / ("" if job is None else job.site)
    with quiet_interrupt(), process_group(topology.world_size, place.backends), one_sentence_errors():
        connected = (
            ldt.connect(topology, device=place.device) if job is None else job.connect(device=place.device)
        )
        with connected as mesh:
            if mesh.is_edge:
                lead(options, mesh, checkpoints)
            else:
                hf.follow(mesh, options.model, checkpoints=checkpoints)
        if mesh.rank == 0 and options.output is not None and checkpoints is not None and options.merge:
            merge(options, checkpoints, options.output / "model", all_here=job is None)


def lead(options: Options, mesh: ldt.Mesh, checkpoints: Path | None) -> None:
    """Run the edge's part, which decides what all ranks do."""
    settings = settings_of(options, mesh.topology)
    if options.output is not None and checkpoints is not None and mesh.rank == 0:
        keep_settings(settings, options, options.output / "settings.json", checkpoints)
    tokenizer = load_tokenizer(options.model)
    check_lengths(options, tokenizer)
    batches, held_out = read_batches(options, tokenizer)
    torch.manual_seed(options.seed + mesh.replica)  # dropout of the edge; hf.follow seeds that of the cloud
    built = hf.build(mesh, options.model, settings)
    training = Training(options, built, batches, held_out, tokenizer, checkpoints)
    if mesh.rank == 0:
        left_out = f"; {batches.left_out} samples without an answer are left out" if batches.left_out else ""
        rows = options.microbatches * options.batch * mesh.topology.edge_dp
        print(f"rows to train on: {len(batches.rows)}{left_out}", flush=True)
        print(f"steps: {training.steps}, of {rows} rows each", flush=True)
    training.run()


def settings_of(options: Options, topology: ldt.Topology) -> hf.Settings:
    """What all ranks must know."""
    layers = AutoConfig.from_pretrained(options.model).get_text_config().num_hidden_layers
    return hf.Settings(
        layers=options.layers or hf.Settings.evenly(layers, topology),
        seed=options.seed,
        dtype=options.weights or ("float32" if options.autocast else None),
        attention=options.attention,
        adapter=options.adapter,
        optimizer=options.optimizer,
        checkpointing=options.checkpointing,
        compile=options.compile,
        scaler=options.autocast == "float16",
        microbatches=options.microbatches,
    )


def keep_settings(settings: hf.Settings, options: Options, file: Path, checkpoints: Path) -> None:
    """Write ``settings`` for `python -m ldt merge`. Raises ValueError if the checkpoints are of other settings."""
    if any(checkpoints.glob("step-*")):
        if not options.resume:
            raise ValueError(
                f"{checkpoints} has checkpoints of another run: give another --output, or --resume=true"
            )
        before = hf.Settings.from_json(json.loads(file.read_text())) if file.is_file() else settings
        for name, was, now in (
            ("adapter", _trained(before.adapter), _trained(settings.adapter)),
            ("optimizer", before.optimizer.name, settings.optimizer.name),
        ):
            if was != now:
                raise ValueError(
                    f"{checkpoints} has checkpoints of {name} {was}, got {now}: give the same, or another --output"
                )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings.to_json(), indent=2))


def _trained(adapter: hf.Adapter | None) -> dict[str, object] | None:
    """What a checkpoint depends on, and cannot tell."""
    if adapter is None:
        return None
    return {"rank": adapter.rank, "scaling": adapter.scaling, "targets": adapter.targets}


def check_lengths(options: Options, tokenizer: Tokenizer) -> None:
    """Raise ValueError for samples or prompts that have more tokens than the model has positions, or none."""
    config = AutoConfig.from_pretrained(options.model).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if options.data.longest > positions:
        raise ValueError(
            f"data.longest is {options.data.longest}, but the model has {positions} positions: give at most that"
        )
    for prompt in options.prompts:
        number = len(tokenizer.encode(prompt))
        if not 0 < number <= positions - options.generate:
            raise ValueError(
                f"a prompt must have 1 to {positions - options.generate} tokens, as the model has {positions} "
                f"positions and generate is {options.generate}; got {number} in {prompt[:40]!r}"
            )


def read_batches(options: Options, tokenizer: Tokenizer) -> tuple[Batches, Batches | None]:
    """The samples to train on, and those held out."""
    data = options.data
    made = [
        Batches(
            [tokenize(tokenizer, sample) for sample in samples],
            options.batch,
            data.longest,
            tokenizer.padding,
            data.packing,
            options.seed,
        )
        for samples in read_samples(data, options.seed)
        if samples
    ]
    return made[0], made[1] if len(made) > 1 else None


def merge(options: Options, checkpoints: Path, folder: Path, all_here: bool) -> None:
    """Write a folder that transformers loads, or say how where the cloud's checkpoints are at its site."""
    if all_here:
        step = hf.save_pretrained(checkpoints, options.model, folder, adapter=options.adapter)
        print(f"wrote the model after step {step} to {folder}")
    else:
        settings = folder.with_name("settings.json")
        print(
            f"to merge: python -m ldt merge {checkpoints} CHECKPOINTS_OF_THE_CLOUD {folder} --model {options.model} "
            f"--settings {settings}"
        )


if __name__ == "__main__":
    main()
