"""The form of documents: lines that fit a screen, links that lead somewhere, a README of one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import README, ROOT, pages, read

LONGEST = 120
LONGEST_README = 150


@pytest.mark.parametrize("page", pages())
def test_lines_of_prose_fit(page: str) -> None:
    """Rows of tables and lines with a link cannot be wrapped."""
    for number, line in enumerate(read(page).splitlines(), 1):
        may_be_long = line.startswith("|") or "](" in line or "://" in line
        assert len(line) <= LONGEST or may_be_long, f"{page}:{number} has {len(line)} characters"


def test_the_readme_is_one_page() -> None:
    assert len(read(README).splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", pages())
def test_links_to_files_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(page)):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


@pytest.mark.parametrize("page", pages())
def test_files_that_it_names_exist(page: str) -> None:
    """Paths in code, such as those of tests; files that a build or a job writes are not in the repository."""
    for path in re.findall(r"`((?:benchmarks|csrc|docs|examples|ldt|tests)/[\w./-]+)`", read(page)):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_the_site_has_every_page() -> None:
    navigation = Path(ROOT, "mkdocs.yml").read_text(encoding="utf-8")
    for page in pages():
        if page.startswith("docs/"):
            assert re.search(rf"[ :-] {re.escape(page.removeprefix('docs/'))}$", navigation, re.MULTILINE), (
                page
            )
