"""Finds complete saves from ranks with different disks, and removes old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ldt
from ldt.train.checkpoint.catalog import complete_saves, describe_incomplete, next_save
from ldt.train.checkpoint.choice import choose
from ldt.train.checkpoint.layout import Save, clear, saves_in


def seen(step: int, *stages: int, again: int = 0, of: int = 3, save_id: str = "a") -> list[Any]:
    return [step, again, [[stage, of, save_id] for stage in stages]]


@pytest.mark.parametrize(
    ("catalogs", "complete"),
    [
        ([], []),
        ([[seen(1, 0)], [seen(1, 1, 2)]], [Save(1)]),
        ([[seen(1, 0), seen(2, 0)], [seen(1, 1, 2), seen(2, 2)]], [Save(1)]),
        ([[seen(1, 0, 1)], [seen(1, 1)]], []),
        ([[seen(1, 0, 1, 2, of=4)]], []),
        ([[seen(1, 0, of=1), seen(1, 0, again=1, of=1), seen(10, 0, of=1)]], [Save(1), Save(1, 1), Save(10)]),
        ([[seen(1)]], []),
    ],
)
def test_complete_saves(catalogs: list[Any], complete: list[Save]) -> None:
    assert complete_saves(catalogs) == complete
    choice = choose(catalogs, None)
    assert (choice and choice.save) == (complete[-1] if complete else None)


@pytest.mark.parametrize(
    "catalogs",
    [
        [[seen(1, 0)], [seen(1, 1, 2, save_id="b")]],
        [[seen(1, 0, 1)], [seen(1, 1, 2, save_id="b")]],
        [[seen(1, 0, 1, 2)], [seen(1, 0, of=1)]],
    ],
)
def test_stages_of_different_saves_are_an_error(catalogs: list[Any]) -> None:
    assert complete_saves(catalogs) == []
    with pytest.raises(ldt.CheckpointError, match=r"step-1/stage-\d is not of the same save"):
        choose(catalogs, None)


def test_what_the_newest_lacks() -> None:
    assert describe_incomplete([[seen(1, 0, 1)], [seen(2, 2)]]) == "step-2 lacks stages [0, 1]"
    assert describe_incomplete([[seen(1, 0, 1, 2)]]) == ""


def test_a_step_is_never_written_where_one_was_begun() -> None:
    assert next_save([[seen(1, 0), seen(2)], [seen(1, 1, again=3)]], 1) == Save(1, 4)
    assert next_save([[seen(1, 0), seen(2)]], 2) == Save(2, 1)
    assert next_save([[seen(1, 0)]], 3) == Save(3)


@pytest.mark.parametrize(
    "catalog",
    [
        [["1/../../elsewhere", 0, []]],
        [[1, "0", []]],
        [[1, 0, [["0", 1, "a"]]]],
        [[1, 0, [[0, 10**12, "a"]]]],
        [[1, 0, [[3, 3, "a"]]]],
    ],
)
def test_what_another_rank_tells_is_looked_at(catalog: list[Any]) -> None:
    with pytest.raises(ldt.LdtError, match="expected numbers"):
        complete_saves([catalog])


def test_only_folders_of_saves_are_saves(tmp_path: Path) -> None:
    for name in ("step-1", "step-12.3", "step-", "step-1.x", "a-step-1", ".removed-step-1", "step--1"):
        (tmp_path / name).mkdir()
    assert saves_in(tmp_path) == [Save(1), Save(12, 3)]
    assert saves_in(tmp_path / "nowhere") == []


def test_older_saves_go_and_what_a_kill_left_of_them(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-2.1", "step-3", "step-4", ".removed-step-2", "notes"):
        (tmp_path / name / "stage-0").mkdir(parents=True)
    clear(tmp_path, Save(3), [Save(1)])
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-1", "step-3", "step-4", "notes"}
