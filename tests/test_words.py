"""Identifiers, comments and documents have one word for each idea, the field's, and none of the words it replaces."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

THIS = Path(__file__).resolve()
ROOT = THIS.parents[1]
FOLDERS = ("ldt", "tests", "benchmarks", "examples", "csrc")

OLD_NAMES = {
    "attendance": "watchdog",
    "carrier": "transport",
    "crew": "worker_pool",
    "disclosure": "redact",
    "discord": "desync",
    "excerpt": "error_context",
    "heard": "received",
    "is of transfer": "is_secondary_error",
    "judge": "compare",
    "judgement": "verdict",
    "knob": "policy",
    "ledger": "message_ring or shared_ring",
    "leftovers": "deferred_free",
    "letterbox": "inbox",
    "mailbox": "stash",
    "mailing": "outbox",
    "patience": "timeout",
    "peer memory": "ipc_pool",
    "peer receiver": "ipc_receiver",
    "peer routes": "ipc_links",
    "peer sender": "ipc_sender",
    "peer stream": "isolated_stream",
    "plan book": "plan_cache",
    "relay": "collectives",
    "roll call": "liveness_probe",
    "row rules": "row_checks",
    "seat": "worker",
    "shape book": "shape_cache",
    "sighting": "rank_status",
    "strand": "stripe",
    "told": "announced or reported",
    "vigil": "failure_detector",
    "wire tensors": "message_tensors",
}
OF_TORCH = "ReduceLROnPlateau(o, patience=0)"
_OLD = re.compile(rf"\b({'|'.join(OLD_NAMES)})s?\b")
_IN_TEXT = re.compile(rf"\b({'|'.join(name.replace(' ', '[ _-]') for name in OLD_NAMES)})s?\b", re.IGNORECASE)
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def words(identifier: str) -> str:
    """``RollCall`` and ``_roll_call`` as ``roll call``."""
    return " ".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier)).lower()


def old_name(identifier: str) -> str | None:
    """The old name that ``identifier`` contains, if any."""
    found = _OLD.search(words(identifier))
    return found and found[1]


def python_identifiers(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def cpp_identifiers(source: str) -> Iterator[tuple[int, str]]:
    code = _COMMENT_OR_STRING.sub(lambda match: "\n" * match[0].count("\n"), source)
    for number, line in enumerate(code.splitlines(), 1):
        yield from ((number, name) for name in re.findall(r"[A-Za-z_]\w*", line))


READERS = {
    ".py": python_identifiers,
    ".pyi": python_identifiers,
    **dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), cpp_identifiers),
}


def old_words(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each old name in a text, whether code or prose, but not inside of another identifier."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, match[0]) for match in _IN_TEXT.finditer(line))


def tracked(folder: str, suffixes: Container[str]) -> list[Path]:
    """The files of a folder in git with one of the suffixes, except this one."""
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    paths = (ROOT / name for name in listed.stdout.split())
    found = [path for path in paths if path.suffix in suffixes and path.is_file() and path != THIS]
    if not found:
        pytest.skip("needs a git checkout")
    return found


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace(OF_TORCH, "ReduceLROnPlateau(o)")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_identifier_has_an_old_name(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} (say {OLD_NAMES[old]})"
        for path in tracked(folder, READERS)
        for line, name in READERS[path.suffix](read(path))
        if (old := old_name(name))
    ]
    assert not found, "old names:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", [*FOLDERS, "docs", "README.md", "CHANGELOG.md"])
def test_no_text_has_an_old_word(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in tracked(folder, {*READERS, ".md"})
        for line, word in old_words(read(path))
    ]
    assert not found, "old words, see OLD_NAMES:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("identifier", "old"),
    [
        ("Strand", "strand"),
        ("_strands_of", "strand"),
        ("RollCall", "roll call"),
        ("roll_call", "roll call"),
        ("HTTPCarriers", "carrier"),
        ("astrand", None),
        ("stripe", None),
    ],
)
def test_old_names_are_found_in_identifiers(identifier: str, old: str | None) -> None:
    assert old_name(identifier) == old


def test_comments_and_strings_of_cpp_are_not_identifiers() -> None:
    source = 'int a; // ledger\n/* ledger\n ledger */ int b = f("ledger \\" ledger");\n'
    assert list(cpp_identifiers(source)) == [(1, "int"), (1, "a"), (3, "int"), (3, "b"), (3, "f")]


def test_old_words_are_found_in_text() -> None:
    text = "# A roll call\nis wire\ntensors; strands: Strand, astrand\nROLL_CALL roll-call"
    found = [(1, "roll call"), (3, "strands"), (3, "Strand"), (4, "ROLL_CALL"), (4, "roll-call")]
    assert list(old_words(text)) == found
