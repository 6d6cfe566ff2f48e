"""Trains a small language model in a U: the first and last layers on the edge, the others in the cloud.

    torchrun --standalone --nproc-per-node 3 examples/train_text.py

Every process runs this file. Only the edge, stage 0, ever has a sample, a label or a loss.
"""

from __future__ import annotations

from text.check import Checker
from text.data import Corpus
from text.device import select_device
from text.generate import continue_text
from text.launch import one_sentence_errors, one_sentence_errors_together, process_group, quiet_interrupt
from text.measure import Meter
from text.model import ByteModel, mean_loss, split_over, token_loss
from text.options import Options, parse_options
from text.recipe import MAX_NORM, Recipe
from text.report import print_report, write_files
from tqdm import tqdm

import ldt
import ldt.plan


def main() -> None:
    options = parse_options()
    with one_sentence_errors():
        device = select_device(options.device)
        topology = ldt.Topology(options.stages, dp=options.dp, edge_dp=options.edge_dp, laps=options.laps)
    with quiet_interrupt(), process_group(topology.world_size, device.backends):
        with one_sentence_errors():
            model = ByteModel.of(options, topology)
            mesh = ldt.connect(topology, device.backend, options.lanes, device=device.device)
        with mesh, device.autocast(options.dtype):
            with one_sentence_errors_together(mesh):
                corpus = Corpus.load(options, device) if mesh.is_edge else None
            pipeline = build_pipeline(options, mesh, model)
            checker = Checker(options, pipeline, model, corpus) if options.check else None
            meter = train(options, pipeline, corpus, checker)
            finish(options, pipeline, corpus, meter)


def build_pipeline(options: Options, mesh: ldt.Mesh, model: ByteModel) -> ldt.Pipeline:
    """Build this rank's chunks and the plan of all ranks."""
    chunks = [model.chunk(index).to(mesh.device) for index in mesh.topology.chunks_of(mesh.stage)]
    if mesh.topology.tp[mesh.stage] > 1:
        for chunk in chunks:
            split_over(mesh.tp_mesh, chunk)
    plan = ldt.plan.ushape(mesh.topology, options.microbatches, lanes=mesh.lanes)
    loss_fn = token_loss if options.loss_reduction == "token" else mean_loss
    return ldt.Pipeline(chunks, mesh, plan, loss_fn=loss_fn, loss_reduction=options.loss_reduction)


def train(options: Options, pipeline: ldt.Pipeline, corpus: Corpus | None, checker: Checker | None) -> Meter:
    """Run all steps: every rank makes the same calls, and only the edge passes microbatches."""
    mesh = pipeline.mesh
    recipe = Recipe(pipeline.parameters(), options.lr, options.steps)
    meter = Meter(mesh)
    tokens = mesh.topology.edge_dp * options.microbatches * options.batch * options.sequence
    with tqdm(total=options.steps * tokens, unit=" tokens", unit_scale=True, disable=mesh.rank != 0) as bar:
        for step in range(options.steps):
            microbatches = corpus.training(step, options.microbatches, mesh.replica) if corpus else None
            result = pipeline.step(microbatches)
            if checker is not None:
                checker.check(step, result)
            ldt.clip_grad_norm_(pipeline.parameters(), MAX_NORM, mesh)
            recipe.update()
            meter.add(result)
            if result.loss is not None:
                bar.set_postfix_str(f"step {step + 1}, loss {float(result.loss):.3f}", refresh=False)
            bar.update(tokens)
    return meter


def finish(options: Options, pipeline: ldt.Pipeline, corpus: Corpus | None, meter: Meter) -> None:
    """Report the loss on held-out text, a generated continuation, and where the time went."""
    held_out = pipeline.eval(corpus.held_out(options.microbatches) if corpus else None)
    text = continue_text(pipeline, options)
    measurement = meter.gather(pipeline, pipeline.plan(options.microbatches))
    if measurement is not None and pipeline.mesh.rank == 0:
        print_report(measurement, held_out, options.prompt, text)
        for path in write_files(measurement, options.output):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
