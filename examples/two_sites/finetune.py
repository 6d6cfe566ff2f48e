"""Fine-tunes a causal language model of bytes on the edge's text, as a rank of ``python -m ldt launch job.toml``.

Only the edge opens the text. Each site saves its own layers in a folder with its name, and goes on from the newest
save if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import ldt
import ldt.plan
from ldt.integrations import hf

Microbatch = tuple[dict[str, torch.Tensor], torch.Tensor]  # the model's inputs, and labels [batch, sequence]


class Options(argparse.Namespace):
    """The parsed command line."""

    model: Path
    text: Path
    checkpoints: Path
    layers: list[int]
    steps: int
    microbatches: int
    save_every: int


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = ldt.Job.from_env()
    with job.connect() as mesh:
        chunks = load_chunks(options, job.topology.chunks_of(mesh.stage))
        plan = ldt.plan.ushape(job.topology, options.microbatches)
        pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")
        train(options, pipeline, options.checkpoints / job.site)
    dist.destroy_process_group()


def load_chunks(options: Options, indices: Sequence[int]) -> list[hf.Chunk]:
    """Build this stage's part of the model."""
    chunks = hf.split(str(options.model), options.layers).build(indices)
    hf.load_weights(chunks, str(options.model))
    return chunks


def train(options: Options, pipeline: ldt.Pipeline, folder: Path) -> None:
    """Run the steps that are left. Every rank makes the same calls, and only the edge passes microbatches."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    text = options.text.read_bytes() if pipeline.mesh.is_edge else None
    state = ldt.load_checkpoint(folder, pipeline, optimizer)
    if state is not None:
        print(f"{state.step} of {options.steps} steps were done before", flush=True)
    for step in range(0 if state is None else state.step, options.steps):
        result = pipeline.step(None if text is None else microbatches(text, step, options.microbatches))
        optimizer.step()
        optimizer.zero_grad()
        if result.loss is not None:
            print(f"step {step + 1} loss {float(result.loss):.3f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            ldt.save_checkpoint(folder, pipeline, optimizer, step=step + 1, keep=2)


def microbatches(text: bytes, step: int, number: int, batch: int = 4, length: int = 64) -> list[Microbatch]:
    """Pieces of the text at random places, the same for a step whenever it is run."""
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (number, batch), generator=chance)
    samples = [torch.tensor([list(text[start : start + length]) for start in row]) for row in starts.tolist()]
    return [({"input_ids": tokens}, tokens) for tokens in samples]


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a model whose tokens are bytes")
    add("--text", type=Path, required=True, help="file that only the edge reads")
    add("--checkpoints", type=Path, required=True, help="folder for saves, one in it for each site")
    add("--layers", type=int, nargs="+", default=[1, 2, 1], help="number of layers of each chunk")
    add("--steps", type=int, default=100, help="optimizer steps in all")
    add("--microbatches", type=int, default=4, help="microbatches of a step")
    add("--save-every", type=int, default=10, metavar="STEPS", help="steps between two saves")
    return parser.parse_args(namespace=Options())


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, ldt.RemoteStageError) as error:  # Ctrl-C, here or at the other site
        if isinstance(error, ldt.RemoteStageError) and error.error_type != KeyboardInterrupt.__name__:
            raise
        sys.exit("interrupted")
