"""Saves a small Llama whose tokens are bytes, with random weights, in place of a model that you have."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to save it")
    folder = parser.parse_args().folder
    torch.manual_seed(0)  # the same on both sites
    LlamaForCausalLM(CONFIG).save_pretrained(folder)


if __name__ == "__main__":
    main()
