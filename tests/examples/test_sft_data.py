"""The data of the fine-tuning recipe and its options, in one process."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("jsonargparse")

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = '{"prompt": "2 + 2 =", "answer": " 4"}'
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}!{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def read(content: str | bytes, folder: Path, name: str = "samples.jsonl", **options: Any) -> Any:
    from sft.options import Data
    from sft.samples import read_samples

    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_samples(Data(str(folder / name), **options), seed=0)


def of_bytes(*samples: dict[str, Any]) -> Any:
    from sft.tokens import Bytes, tokenize

    return [tokenize(Bytes(), sample) for sample in samples]


def batches(*samples: dict[str, Any], batch: int = 2, longest: int = 20, packing: bool = False) -> Any:
    from sft.batches import Batches

    return Batches(of_bytes(*samples), batch, longest, padding=0, packing=packing, seed=0)


def text(size: int) -> dict[str, str]:
    """A sample of ``size`` tokens, of which the last one ends the text."""
    return {"text": "x" * (size - 1)}


# -- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "\n", " \n\n\t\n"])
def test_a_file_without_samples_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"samples\.jsonl has no samples: expected lines of {\"prompt\""):
        read(content, tmp_path)


def test_blank_lines_and_other_line_separators_in_strings_are_no_lines(tmp_path: Path) -> None:
    samples, held_out = read(f'\n{GOOD}\r\n  \n{{"prompt": "a\u2028b", "answer": "c\x85"}}\n\n', tmp_path)
    assert [sample["prompt"] for sample in samples] == ["2 + 2 =", "a\u2028b"]
    assert held_out == []


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
        ('{"text": ""}', '"text" is empty'),
        ('{"messages": []}', '"messages" must be a list that is not empty'),
        ('{"messages": [{"role": "user"}]}', 'a message needs a "content"'),
        (
            '{"messages": [{"role": "bot", "content": "1"}]}',
            'the "role" of a message must be one of system, user',
        ),
        ('{"messages": [{"role": "user", "content": "1"}]}', "so nothing is learned"),
        ('{"messages": [{"role": "assistant", "content": "1"}]}', "who must answer another"),
        ('{"text": "\\ud800"}', '"text" has half of a surrogate pair'),
        (
            '{"messages": [{"role": "user", "content": "\\udfff"}]}',
            "of a message has half of a surrogate pair",
        ),
        ("[" * 100_000, r"no JSON in UTF-8 \(maximum recursion depth"),
        ("9" * 200, rf"got {'9' * 100}\.\.\.: an object is needed, not int"),
    ],
)
def test_a_wrong_line_is_named(line: str | bytes, fault: str, tmp_path: Path) -> None:
    encoded = line.encode() if isinstance(line, str) else line
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 3: expected {\"prompt\".*" + fault):
        read(GOOD.encode() + b"\n\n" + encoded, tmp_path)


def test_parquet_has_the_same_samples(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "samples.parquet"
    datasets.Dataset.from_list([json.loads(GOOD), {"prompt": "1", "answer": "2"}]).to_parquet(str(file))
    samples, _ = read(file.read_bytes(), tmp_path, "samples.parquet")
    assert samples == [json.loads(GOOD), {"prompt": "1", "answer": "2"}]
    datasets.Dataset.from_list([json.loads(GOOD), {"prompt": "1"}]).to_parquet(str(file))
    with pytest.raises(ValueError, match=r"samples\.parquet, row 1: .* no \"answer\""):
        read(file.read_bytes(), tmp_path, "samples.parquet")


def test_held_out_samples_are_a_share_or_a_file(tmp_path: Path) -> None:
    lines = [json.dumps({"text": str(number)}) for number in range(10)]
    samples, held_out = read("\n".join(lines), tmp_path, validation=0.2)
    assert (len(samples), len(held_out)) == (8, 2)
    assert sorted(int(sample["text"]) for sample in samples + held_out) == list(range(10))
    samples, held_out = read(lines[0], tmp_path, validation=str(tmp_path / "samples.jsonl"))
    assert samples == held_out
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="a share from 0 to 1, got"):
            read("\n".join(lines), tmp_path, validation=share)
    with pytest.raises(ValueError, match="of 1 samples leaves none on a side"):
        read(lines[0], tmp_path, validation=0.2)


# -- tokens and batches ------------------------------------------------------------------------------------------


def test_answers_are_learned_with_their_end() -> None:
    (answer, whole) = of_bytes({"prompt": "ab", "answer": "c"}, {"text": "de"})
    assert answer == ([*b"abc", 0], [False, False, True, True])
    assert whole == ([*b"de", 0], [True, True, True])


def test_what_the_assistant_says_is_learned(tmp_path: Path) -> None:
    from sft.tokens import load_tokenizer, tokenize
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("?!<>abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")
    chat = {
        "messages": [
            {"role": role, "content": content}
            for role, content in [("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "no")]
        ]
    }
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        tokenize(load_tokenizer(str(tmp_path)), chat)
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    tokens, learned = tokenize(loaded, chat)
    names = {number: letter for letter, number in letters.items()}
    shown = "".join(
        names[token] if is_learned else "." for token, is_learned in zip(tokens, learned, strict=True)
    )
    assert shown.replace(".", "") == "yo!no!"
    assert len(tokens) == len("<user>hi<assistant>yo!<user>so<assistant>no!")
    made.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="renders the beginning of a chat differently"):
        tokenize(load_tokenizer(str(tmp_path)), chat)
    with pytest.raises(ValueError, match="need a model folder"):
        of_bytes(chat)


def test_padded_rows_and_labels() -> None:
    ((inputs, labels),) = batches({"prompt": "ab", "answer": "c"}, batch=1).step(0, 1)
    assert inputs["input_ids"][0, :5].tolist() == [*b"abc", 0, 0]
    assert inputs["attention_mask"][0, :5].tolist() == [1, 1, 1, 1, 0]
    assert labels[0, :5].tolist() == [-100, -100, ord("c"), 0, -100]


def test_samples_without_answers_are_left_out() -> None:
    data = batches({"prompt": "12345", "answer": "6"}, {"prompt": "1", "answer": "1"}, longest=5)
    assert data.left_out == 1
    assert len(data.rows) == 1
    with pytest.raises(ValueError, match=r"no sample has an answer within 5 tokens: raise data\.longest"):
        batches({"prompt": "12345", "answer": "6"}, longest=5)


def test_packed_samples_do_not_predict_each_other() -> None:
    data = batches(text(6), text(3), text(4), text(9), batch=4, longest=10, packing=True)
    assert sorted(sorted(len(sample.tokens) for sample in row) for row in data.rows) == [[3], [4, 6], [9]]
    ((inputs, labels),) = data.all()
    assert "attention_mask" not in inputs
    positions = inputs["position_ids"]
    assert positions.shape == labels.shape == (3, 10)
    assert ((labels == -100) | (positions > 0)).all()  # the first token of a sample is nobody's label
    assert int((labels != -100).sum()) == 6 + 3 + 4 + 9 - 4


def test_steps_are_epochs_in_another_order_and_replicas_share_them() -> None:
    data = batches(*(text(size) for size in range(2, 14)), batch=2)
    assert data.steps(1.0, 3) == 2
    assert data.steps(2.5, 3) == 5

    def lengths(step: int, **replica: int) -> list[int]:
        return [
            int(n) for inputs, _ in data.step(step, 3, **replica) for n in inputs["attention_mask"].sum(-1)
        ]

    first, second = lengths(0) + lengths(1), lengths(2) + lengths(3)
    assert sorted(first) == sorted(second) == list(range(2, 14))
    assert first != second
    assert lengths(1) == first[6:]
    assert lengths(0, replica=0, replicas=2) + lengths(0, replica=1, replicas=2) == first


# -- options -----------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_a_file(tmp_path: Path) -> None:
    from sft.options import parse_options

    recipe = str(EXAMPLES / "sft" / "lora.toml")
    options = parse_options(
        ["--config", recipe, "--adapter.rank", "4", "--layers", "[1,2,1]", "--steps", "7"]
    )
    assert (options.adapter.rank, options.adapter.dropout) == (4, 0.05)
    assert (options.layers, options.steps, options.data.packing) == ([1, 2, 1], 7, True)
    (tmp_path / "recipe.yaml").write_text("model: m\ndata:\n  path: p\n  validation: held.jsonl\n")
    options = parse_options(["--config", str(tmp_path / "recipe.yaml")])
    assert (options.model, options.data.validation, options.adapter) == ("m", "held.jsonl", None)


def test_the_file_of_the_page_is_understood(tmp_path: Path) -> None:
    from sft.options import parse_options

    page = (EXAMPLES.parent / "docs" / "guides" / "finetune.md").read_text()
    (tmp_path / "recipe.toml").write_text(page.split('```toml title="recipe.toml"')[1].split("```")[0])
    options = parse_options(["--config", str(tmp_path / "recipe.toml")])
    assert (options.optimizer.name, options.layers, options.data.packing) == (
        "adamw_8bit",
        [2, 13, 13, 2],
        True,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch", "0"], "batch must be above 0, got 0"),
        (["--batch", "1.5"], "batch"),
        (["--batches", "2"], "unrecognized arguments: --batches"),
        (["--steps", "-3"], "steps must be at least 1, got -3"),
        (["--steps", "many"], "steps"),
        (["--optimizer.name", "adam"], "optimizer.name"),
        (["--optimizer.lr", "0"], "optimizer.lr must be a number above 0, got 0"),
        (["--optimizer.lr", "-1"], "optimizer.lr must be a number above 0, got -1"),
        (["--adapter.rank", "0"], "adapter.rank must be at least 1, got 0"),
        (["--data.longest", "1"], "data.longest must be at least 2, got 1"),
        (["--autocast", "bfloat16", "--weights", "float16"], "autocast=bfloat16 needs weights in float32"),
        (["--model", __file__, "--adapter.rank", "2", "--output", "o"], "of a config alone cannot be merged"),
        (["--warm_up", "2"], "warm_up must be a share from 0 to 1, got 2"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sft.options import parse_options

    with pytest.raises(SystemExit):
        parse_options(["--model", "m", "--data.path", "p", *arguments])
    assert sentence in capsys.readouterr().err


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


def test_the_help_says_what_options_are(capsys: pytest.CaptureFixture[str]) -> None:
    from sft.options import parse_options

    with pytest.raises(SystemExit):
        parse_options(["--help"])
    assert "passes over the samples" in capsys.readouterr().out, "jsonargparse[signatures] reads docstrings"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"longest": 65}, "data.longest is 65, but the model has 64 positions"),
        ({"prompts": [""]}, "must have 1 to 14 tokens, .*; got 0 in ''"),
        ({"prompts": ["of fifteen byte"]}, "generate is 50; got 15 in 'of fifteen byte'"),
        ({"prompts": ["of 14 bytes it"]}, None),
    ],
)
def test_what_is_longer_than_the_model_is_refused(
    changes: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    import contextlib

    pytest.importorskip("peft")
    from finetune_hf import check_lengths
    from sft.options import Data, Options
    from sft.tokens import load_tokenizer
    from transformers import LlamaConfig

    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    model = str(tmp_path / "config.json")
    data = Data("p", longest=changes.get("longest", 64))
    options = Options(model=model, data=data, prompts=changes.get("prompts", []))
    with pytest.raises(ValueError, match=sentence) if sentence else contextlib.nullcontext():
        check_lengths(options, load_tokenizer(model))


@pytest.mark.parametrize(
    ("program", "option", "value", "sentence"),
    [
        *[("train_vlm", *wrong) for wrong in WRONG],
        ("train_vlm", "--clip", "-1", "must be a number of at least 0, got -1"),
        *[("text.options", *wrong) for wrong in WRONG],
        ("text.options", "--continuation", "-1", "must be at least 0, got -1"),
    ],
)
def test_numbers_of_the_command_line_are_checked(
    program: str, option: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for needed in ("tqdm", "sklearn") if program != "text.options" else ():
        pytest.importorskip(needed)
    monkeypatch.setattr(sys, "argv", [program, f"{option}={value}"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).parse_options()
    assert ended.value.code == 2
    assert f"error: argument {option}: {sentence}\n" in capsys.readouterr().err
