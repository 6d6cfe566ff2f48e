"""Refuses, by name, what cannot be right for a model that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from ldt.integrations.hf.chunks import Chunk
from ldt.runtime.common.redact import InputValueError
from ldt.runtime.pipeline import Pipeline

__all__ = ["refuse"]

# Arguments that must have their default, a function that says if they do, and why.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "auto_find_batch_size": (bool, "a step that runs out of memory on one rank fails on all"),
    "bf16_full_eval": (bool, "it casts the weights of the edge alone; use bf16"),
    "deepspeed": (bool, "stages of the pipeline are the parallelism"),
    "fp16_full_eval": (bool, "it casts the weights of the edge alone; use fp16"),
    "fsdp": (bool, "stages of the pipeline are the parallelism"),
    "label_smoothing_factor": (bool, "write it into the loss_fn of the pipeline"),
    "neftune_noise_alpha": (lambda alpha: alpha is not None, "it hooks the embedding of a whole model"),
    "parallelism_config": (bool, "stages of the pipeline are the parallelism"),
    "push_to_hub": (bool, "the edge has only its part of the weights; merge a checkpoint and upload that"),
    "torch_compile": (bool, "compile the chunks instead, before Pipeline()"),
    "loss_type": (lambda kind: kind not in (None, "nll"), "write it as the loss_fn of the pipeline"),
    "router_aux_loss_coef": (bool, "no stage has the routers of all layers"),
    "use_liger_kernel": (bool, "it patches a whole model; patch the chunks before Pipeline()"),
}
_OPTIMIZERS = ("apollo", "galore", "lomo", "schedule_free")
_PARAMETERS = {
    "compute_loss_func": "write it as the loss_fn of the pipeline",
    "model_init": "the pipeline has its weights; make a new pipeline for each run",
    "peft_config": "use hf.add_adapter before Pipeline()",
    "quantization_config": "quantize the chunks before Pipeline()",
}


def refuse(
    pipeline: Pipeline, args: TrainingArguments, given: Mapping[str, Any], trainer: type, known_loss: object
) -> None:
    """Raise ValueError naming all that is refused. ``given`` are the arguments of the constructor."""
    found = [*_in_pipeline(pipeline, args), *_in_arguments(args)]
    found += [f"{name}= ({reason})" for name, reason in _PARAMETERS.items() if given.get(name) is not None]
    if getattr(trainer, "compute_loss", None) is not known_loss:
        found.append(f"{trainer.__name__}.compute_loss (write it as the loss_fn of the pipeline)")
    if found:
        raise InputValueError("ldt's Trainer does not support " + "; ".join(found))


def _in_arguments(args: TrainingArguments) -> Iterator[str]:
    for name, (is_set, reason) in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if is_set(value):
            yield f"{name}={value!r} ({reason})"
    optimizer = getattr(args.optim, "value", args.optim)
    if any(kind in optimizer for kind in _OPTIMIZERS):
        yield f"optim={optimizer!r} (it needs the whole model, or more than one call a step)"
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        yield f"mixed precision {args.mixed_precision!r} (use bf16 or fp16)"


def _in_pipeline(pipeline: Pipeline, args: TrainingArguments) -> Iterator[str]:
    mesh, loss, fp16 = pipeline.mesh, pipeline.steps.loss, args.mixed_precision == "fp16"
    if len(mesh.topology.ranks_of_stage(0)) > 1:
        yield f"an edge of {len(mesh.topology.ranks_of_stage(0))} ranks (use tp=1 and edge_dp=1 there)"
    others = [type(chunk).__name__ for chunk in pipeline.chunks if not isinstance(chunk, Chunk)]
    if others:
        yield f"chunks that are not those of ldt.integrations.hf ({', '.join(others)})"
    if loss.reduction != "sum":
        yield (
            f"a pipeline with loss_reduction={loss.reduction!r} (give Pipeline loss_reduction='sum' on all ranks and "
            "loss_fn=hf.causal_lm_loss on the edge)"
        )
    if fp16 and loss.grad_scaler is None:
        yield "fp16=True without a grad scaler (give Pipeline grad_scaler=ldt.GradScaler(mesh))"
    if loss.grad_scaler is not None and not fp16:
        yield "a pipeline with a grad scaler without fp16=True"
