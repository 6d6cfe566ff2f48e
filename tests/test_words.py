"""Names the package no longer uses: identifiers have one word for each idea, the field's."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ldt", "tests", "benchmarks", "examples", "csrc")

OLD_NAMES = {
    "attendance": "watchdog",
    "carrier": "transport",
    "crew": "worker_pool",
    "disclosure": "redact",
    "discord": "desync",
    "excerpt": "error_context",
    "is of transfer": "is_secondary_error",
    "judgement": "verdict",
    "knob": "policy",
    "ledger": "message_ring or shared_ring",
    "leftovers": "deferred_free",
    "letterbox": "inbox",
    "mailbox": "stash",
    "mailing": "outbox",
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
    "vigil": "failure_detector",
    "wire tensors": "message_tensors",
}
_OLD = re.compile(rf"\b({'|'.join(OLD_NAMES)})s?\b")
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


def sources(folder: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    paths = (ROOT / name for name in listed.stdout.split())
    return [path for path in paths if path.suffix in READERS and path.is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_identifier_has_an_old_name(folder: str) -> None:
    paths = sources(folder)
    if not paths:
        pytest.skip("needs a git checkout")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} (say {OLD_NAMES[old]})"
        for path in paths
        for line, name in READERS[path.suffix](path.read_text())
        if (old := old_name(name))
    ]
    assert not found, "old names:\n" + "\n".join(found)


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
