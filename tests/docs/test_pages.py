"""The Python blocks of each page run, then its ldt commands, and both print what the page shows."""

from __future__ import annotations

import doctest
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pages import ELSEWHERE, ROOT, SESSIONS, Block, blocks, commands, is_run_elsewhere, pages, read
from sessions import RANKS, run

from ldt.cli import main
from ldt.testing import RankPool, allowed

WORLD_SIZE = RANKS
SECONDS = 120.0
SAME = doctest.OutputChecker()


def snippets(page: str) -> list[Block]:
    """Return the blocks to run here: Python without a title, in the order of the page."""
    return [block for block in blocks(page) if block.language == "python" and not is_run_elsewhere(block)]


@pytest.mark.parametrize("page", pages())
def test_the_page_runs_and_prints_what_it_shows(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    session = SESSIONS.get(page)
    found = snippets(page)
    assert (session is not None) == bool(found), "a page with Python needs a session in pages.py"
    if session in ("hugging_face", "encoders"):
        pytest.importorskip("transformers")
    printed: dict[int, str] = {}
    if session == "plain":
        printed = outputs(found, run(session, found, str(tmp_path)))
    elif session is not None:
        pool: RankPool = request.getfixturevalue("pool")
        printed = outputs(found, pool.run(run, session, found, str(tmp_path), timeout=allowed(SECONDS))[0])
    printed |= run_commands(page, tmp_path, request.getfixturevalue("capsys"))
    for block, text in shown(page):
        expected = printed[block.line]
        assert SAME.check_output(text, expected, doctest.ELLIPSIS), f"{page}:{block.line} prints\n{expected}"


def outputs(found: list[Block], printed: list[str]) -> dict[int, str]:
    return {block.line: text for block, text in zip(found, printed, strict=True)}


def run_commands(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    """Return the output of each block that is an ldt command, except `doctor`, which has its own tests."""
    printed = {}
    for block in blocks(page):
        runs = block.text.startswith(("python -m ldt plan", "python -m ldt merge"))
        if block.language == "sh" and runs and not is_run_elsewhere(block):
            (command,) = commands(block)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                assert main(shlex.split(command)[3:]) == 0, capsys.readouterr()
            printed[block.line] = capsys.readouterr().out
    return printed


def shown(page: str) -> Iterator[tuple[Block, str]]:
    """Yield each block whose output the page shows, with that output."""
    before: Block | None = None
    for block in blocks(page):
        if block.shows_output:
            assert before is not None
            yield before, block.text
        before = block


def test_a_block_that_is_run_elsewhere_is_read_there() -> None:
    for page, word, test in ELSEWHERE:
        assert any(word in block.title + block.text for block in blocks(page)), (page, word)
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), test


def test_every_fence_is_understood() -> None:
    for page in pages():
        assert read(page).count("```") == 2 * len(blocks(page)), page
        for block in blocks(page):
            assert block.language in ("python", "sh", "text", "toml", "yaml", "bibtex", ""), (
                page,
                block.line,
            )
            assert not block.title or is_run_elsewhere(block), (page, block.line)
