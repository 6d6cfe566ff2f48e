"""Runs the Python blocks of a page, on the ranks of a pool or in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pages import Block
from torch import nn

import ldt
import ldt.plan

__all__ = ["RANKS", "run"]

Names = dict[str, Any]
RANKS = 3
_LAYERS = 30  # of the guide's Hugging Face model


def run(session: str, blocks: list[Block], folder: str) -> list[str]:
    """Return what each block prints. The blocks share a folder and the initial names of ``session``."""
    with _inside(folder):
        names = _SESSIONS[session]()
        meshes = [names.get("mesh")]
        printed = []
        for block in blocks:
            code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, names)
            printed.append(output.getvalue())
            meshes.append(names.get("mesh"))
        for mesh in filter(None, dict.fromkeys(meshes)):
            mesh.close()
    return printed


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _plain() -> Names:
    return {"__name__": "page", "json": json, "ldt": ldt, "nn": nn, "torch": torch}


def _ranks() -> Names:
    torch.manual_seed(0)
    samples = torch.rand(4, 16, 32)
    return {**_plain(), "batch": [(x, x.roll(1, -1)) for x in samples]}


def _job() -> Names:
    """Run the README's program up to its first step."""
    topology = ldt.Topology(tp=[1, 1, 1])
    mesh = ldt.connect(topology)
    torch.manual_seed(0)
    chunks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(topology.num_chunks)]
    mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
    loss_fn = nn.functional.mse_loss
    plan = ldt.plan.ushape(topology, num_microbatches=8)
    pipeline = ldt.Pipeline(mine, mesh, plan, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    samples = torch.rand(8, 16, 32)
    batch = [(x, x.roll(1, -1)) for x in samples] if mesh.is_edge else None
    return {
        **_plain(),
        "topology": topology,
        "mesh": mesh,
        "mine": mine,
        "loss_fn": loss_fn,
        "plan": plan,
        "pipeline": pipeline,
        "optimizer": optimizer,
        "batch": batch,
    }


def _hugging_face() -> Names:
    """Save a small model where the guide reads one, and create a batch for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    topology = ldt.Topology(tp=[1] * RANKS)
    mesh = ldt.connect(topology)
    if mesh.is_edge:
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=_LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        LlamaForCausalLM(config).save_pretrained("path/to/model")
    dist.barrier()
    ids = torch.randint(32, (2, 8))
    return {
        **_plain(),
        "topology": topology,
        "mesh": mesh,
        "ids": ids,
        "mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "texts": [{"input_ids": row, "labels": row} for row in torch.randint(32, (20, 8))],
    }


def _encoders() -> Names:
    """Save a small vision-language model where the guide reads one, and create a batch for it."""
    from transformers import AutoConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 12, "num_attention_heads": 2}
    ids = torch.randint(31, (2, 8))
    ids[:, 1:5] = 31
    if dist.get_rank() == 0:
        config = AutoConfig.for_model(
            "llava",
            text_config={"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2, **sizes},
            vision_config={"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, **sizes},
            image_token_id=31,
        )
        LlavaForConditionalGeneration(config).save_pretrained("path/to/llava")
    dist.barrier()
    return {**_plain(), "ids": ids, "pixels": torch.randn(2, 3, 4, 4), "labels": ids.clone()}


_SESSIONS: dict[str, Callable[[], Names]] = {
    "plain": _plain,
    "ranks": _ranks,
    "job": _job,
    "hugging_face": _hugging_face,
    "encoders": _encoders,
}
