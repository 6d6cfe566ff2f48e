"""Generates text with the trained model, one byte for each ``Pipeline.eval``."""

from __future__ import annotations

import torch

import ldt
from text.options import Options

__all__ = ["continue_text"]

TEMPERATURE = 0.7  # below 1: favors likely bytes


def continue_text(pipeline: ldt.Pipeline, options: Options) -> str:
    """Generate the continuation of ``options.prompt``. A collective call.

    Returns the continuation on the edge and nothing elsewhere: what is written never leaves it.
    """
    text = list(options.prompt.encode() or b"\n")
    begin = len(text)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.continuation):
        if not pipeline.mesh.is_edge:
            pipeline.eval()
            continue
        seen = text[-options.sequence :]
        padding = [0] * (
            options.sequence - len(seen)
        )  # keeps one shape; causal attention ignores what follows the text
        inputs = torch.tensor([seen + padding], device=pipeline.mesh.device)
        outputs = pipeline.eval([(inputs, None)]).outputs
        assert outputs is not None
        scores = outputs[0][0, len(seen) - 1].float().cpu()
        text.append(int(torch.multinomial(torch.softmax(scores / TEMPERATURE, -1), 1, generator=generator)))
    return bytes(text[begin:]).decode(errors="replace")
