"""Reads samples from a JSONL or Parquet file or a dataset of the hub, and checks their form. Used only on the edge."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft.options import Data

__all__ = ["Sample", "read_samples"]

Sample = dict[str, Any]

EXPECTED = (
    '{"prompt": "...", "answer": "..."}, {"messages": [{"role": "...", "content": "..."}]} or {"text": "..."}'
)
SHOWN = 100  # characters of a malformed sample
ROLES = ("system", "user", "assistant", "tool")


def read_samples(data: Data, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on and those held out. Raises ValueError naming the file and the line."""
    samples = _read(data.path, data.split)
    if isinstance(data.validation, str):
        return samples, _read(data.validation, data.split)
    if not 0 <= data.validation < 1:
        raise ValueError(f"data.validation must be a path or a share from 0 to 1, got {data.validation}")
    held_out = round(data.validation * len(samples))
    if data.validation > 0:
        random.Random(seed).shuffle(samples)
        if held_out in (0, len(samples)):
            raise ValueError(
                f"data.validation={data.validation} of {len(samples)} samples leaves none on a side"
            )
    return samples[held_out:], samples[:held_out]


def _read(path: str, split: str) -> list[Sample]:
    samples = []
    for where, sample, shown in _lines(path) if path.endswith((".json", ".jsonl")) else _rows(path, split):
        fault = _fault(sample) if isinstance(sample, dict) else str(sample)
        if fault:
            got = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
            raise ValueError(f"{path}, {where}: expected {EXPECTED}, got {got}: {fault}")
        samples.append(sample)
    if not samples:
        raise ValueError(f"{path} has no samples: expected lines of {EXPECTED}, got none")
    return samples


def _lines(path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the place, the sample or what is wrong with it, and the text of each line that is not blank."""
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line.decode())
            if not isinstance(sample, dict):
                sample = f"an object is needed, not {type(sample).__name__}"
        except (ValueError, RecursionError) as error:
            sample = f"no JSON in UTF-8 ({error})"
        yield f"line {number}", sample, line.decode(errors="replace")


def _rows(path: str, split: str) -> Iterator[tuple[str, Any, str]]:
    """The same for each row of a Parquet file, or of a dataset on the hub or in a folder."""
    from datasets import load_dataset

    if path.endswith(".parquet"):
        rows = load_dataset("parquet", data_files=path, split="train")
    else:
        rows = load_dataset(path, split=split)
    for number, row in enumerate(rows):
        sample = {name: value for name, value in row.items() if value is not None}
        yield f"row {number}", sample, json.dumps(sample, default=str)


def _fault(sample: Sample) -> str:
    """Describe what is wrong with a sample; empty if nothing."""
    if "messages" in sample:
        return _fault_of_chat(sample["messages"])
    keys = ("text",) if "text" in sample else ("prompt", "answer")
    for key in keys:
        if key not in sample:
            return f'no "{key}"'
        if not isinstance(sample[key], str):
            return f'"{key}" must be a string, not {type(sample[key]).__name__}'
        if not sample[key]:
            return f'"{key}" is empty'
        if not _is_text(sample[key]):
            return f'"{key}" has half of a surrogate pair, which is no character'
    return ""


def _fault_of_chat(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        return '"messages" must be a list that is not empty'
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return 'a message needs a "content" that is a string'
        if not _is_text(message["content"]):
            return 'the "content" of a message has half of a surrogate pair, which is no character'
        if message.get("role") not in ROLES:
            return f'the "role" of a message must be one of {", ".join(ROLES)}'
    if not any(message["role"] == "assistant" for message in messages):
        return 'no message has the "role" of the assistant, so nothing is learned'
    if messages[0]["role"] == "assistant":
        return 'the first message has the "role" of the assistant, who must answer another'
    return ""


def _is_text(text: str) -> bool:
    """Whether it can be written in UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
