"""The bytes of version 1: those of docs/wire_format.md, and the tables there."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from masks import assert_same, opened

from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.step.metadata import (
    MAX_METADATA_ELEMENTS,
    METADATA_NAMES,
    MicrobatchMetadata,
    StepMessage,
    pack,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire_format.md").read_text(encoding="utf-8")

HOP = (TensorSpec((2, 6, 8), torch.bfloat16, True),)
EXAMPLE = StepMessage(
    "step",
    "f00d",
    "",
    None,
    (
        MicrobatchMetadata(
            0,
            (HOP,),
            {
                "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0]]),
                "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 0, 1, 2, 1]]),
            },
        ),
        MicrobatchMetadata(
            1,
            (HOP,),
            {
                "attention_mask": torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1, 1]], dtype=torch.bool),
                "image_grid_thw": torch.tensor([[1, 4, 6]]),
            },
        ),
    ),
)


def documented_bytes() -> torch.Tensor:
    block = DOCUMENT.split("```")[1]
    lines = [re.split(r" {3,}", line)[0] for line in block.strip().splitlines()]
    return torch.tensor(list(bytes.fromhex(" ".join(lines))), dtype=torch.uint8)


def test_the_example_of_the_document() -> None:
    assert pack(EXAMPLE).tolist() == documented_bytes().tolist()
    assert_same(EXAMPLE, opened(documented_bytes()))


def test_names_and_types_of_the_document() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCUMENT.splitlines() if "|" in line]
    table = [row for row in rows if len(row) == 10 and (row[0] + row[4]).isdigit()]
    names = {int(row[0]): row[1].strip("`") for row in table if row[0]}
    assert names == dict(enumerate(METADATA_NAMES))
    types = {int(row[place]): row[place + 1] for row in table for place in (4, 6, 8) if row[place]}
    for code, name in types.items():
        spec = TensorSpec((), getattr(torch, name))
        data = pack(StepMessage("step", "", "", None, (MicrobatchMetadata(0, ((spec,),)),)))
        assert data[7 + 3 + 3 + 1] == code  # after the header: the call, the counts and the number of tensors
    assert MAX_METADATA_ELEMENTS == 1 << 28
