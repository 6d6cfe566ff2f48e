"""The data of the fine-tuning example, and the numbers of the examples' command lines, in one process."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def answers(content: str | bytes, folder: Path, longest: int = 20) -> Any:
    from sft.data import Answers

    config, file = folder / "config.json", folder / "samples.jsonl"
    config.write_text("{}")  # a file: bytes are tokens
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return Answers(file, str(config), batch=2, longest=longest, seed=0)


GOOD = '{"prompt": "2 + 2 =", "answer": " 4"}'


@pytest.mark.parametrize("content", ["", "\n", " \n\n\t\n"])
def test_a_file_without_samples_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"samples\.jsonl has no samples: expected lines of {\"prompt\""):
        answers(content, tmp_path)


def test_a_file_without_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"samples\.jsonl has no answer within 7 tokens.*raise --longest"):
        answers(GOOD, tmp_path, longest=7)
    assert answers(GOOD, tmp_path, longest=8).left_out == 0


def test_samples_without_answers_are_left_out(tmp_path: Path) -> None:
    short = json.dumps({"prompt": "1", "answer": "1"})
    data = answers(f"{GOOD}\n{short}\n{GOOD}", tmp_path, longest=5)
    assert data.left_out == 2
    for _, labels in data.next(3):
        assert labels.tolist() == [[-100, ord("1"), 0]]


def test_blank_lines_and_other_line_separators_in_strings_are_no_lines(tmp_path: Path) -> None:
    data = answers(f'\n{GOOD}\r\n  \n{{"prompt": "a\u2028b", "answer": "c\x85"}}\n\n', tmp_path)
    assert sum(len(labels) for _, labels in data.next(1)) == 2


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("not json", r"got not json: no JSON in UTF-8 \(Expecting value"),
        ('{"prompt": "1"', r"no JSON in UTF-8 \(Expecting"),
        (b'{"prompt": "\xe9", "answer": "1"}', r"no JSON in UTF-8 \('utf-8' codec"),
        ('["1", "2"]', "an object is needed, not list"),
        ('{"prompt": "1", "ans": "2"}', 'no "answer"'),
        ('{"answer": "2"}', 'no "prompt"'),
        ('{"prompt": "1", "answer": 2}', '"answer" must be a string, not int'),
        ('{"prompt": null, "answer": "2"}', '"prompt" must be a string, not NoneType'),
        ('{"prompt": "", "answer": "2"}', '"prompt" is empty'),
        ("9" * 200, rf"got {'9' * 100}\.\.\.: an object is needed, not int"),
    ],
)
def test_a_wrong_line_is_named(line: str | bytes, fault: str, tmp_path: Path) -> None:
    encoded = line.encode() if isinstance(line, str) else line
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 3: expected {\"prompt\".*" + fault):
        answers(GOOD.encode() + b"\n\n" + encoded, tmp_path)


WRONG = [
    ("--steps", "0", "must be at least 1, got 0"),
    ("--steps", "-3", "must be at least 1, got -3"),
    ("--steps", "many", "must be a whole number of at least 1, got many"),
    ("--microbatches", "0", "must be at least 1, got 0"),
    ("--batch", "1.5", "must be a whole number of at least 1, got 1.5"),
    ("--lr", "0", "must be a number above 0, got 0"),
    ("--lr", "nan", "must be a number above 0, got nan"),
    ("--lr", "-1", "must be a number above 0, got -1"),
]


@pytest.mark.parametrize(
    ("program", "option", "value", "sentence"),
    [
        *[("train_vlm", *wrong) for wrong in WRONG],
        ("train_vlm", "--clip", "-1", "must be a number of at least 0, got -1"),
        *[("finetune_hf", *wrong) for wrong in WRONG],
        ("finetune_hf", "--longest", "0", "must be at least 1, got 0"),
        ("finetune_hf", "--lora", "-1", "must be at least 0, got -1"),
        ("finetune_hf", "--layers", "-1", "must be at least 0, got -1"),
        *[("text.options", *wrong) for wrong in WRONG],
        ("text.options", "--continuation", "-1", "must be at least 0, got -1"),
    ],
)
def test_numbers_of_the_command_line_are_checked(
    program: str, option: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for needed in ("peft", "tqdm", "sklearn") if program != "text.options" else ():
        pytest.importorskip(needed)
    given = ["--model=m", "--data=d"] if program == "finetune_hf" else []
    monkeypatch.setattr(sys, "argv", [program, *given, f"{option}={value}"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).parse_options()
    assert ended.value.code == 2
    assert f"error: argument {option}: {sentence}\n" in capsys.readouterr().err
