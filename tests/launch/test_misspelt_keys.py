"""Every key of job.toml, misspelt by one character: the error names it, its table, and the key that was meant."""

from __future__ import annotations

import copy
import json
import string
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ldt
from ldt.launch import description
from ldt.launch.description import read

SITE = {"interface": "wg0", "device": "cpu", "command": ["train.py"]}
LINK = {"activations": "8bit", "gradients": "bf16"}
JOB: dict[str, Any] = {
    "script": "train.py",
    "arguments": ["--steps"],
    "topology": {
        "tp": [1, 1],
        "dp": 1,
        "edge_dp": 1,
        "laps": 1,
        "placement": [0, 1, 0],
        "sites": ["edge", "cloud"],
    },
    "sites": {
        "edge": {"address": "10.0.0.1", "port": 29500, **SITE},
        "cloud": {"address": "10.0.0.2", **SITE},
    },
    "tunnel": {"endpoint": "10.88.0.2:51820", "mtu": 1420},
    "connect": {
        "backend": "gloo",
        "lanes": "paired",
        "transfer": {"0-1": "leader"},
        "transport": "c10d",
        "compression": {"0-1": LINK},
        "timeout": 60,
        "transfer_timeout": 60,
        "heartbeat_timeout": 5,
        "stall_timeout": 60,
        "outage": 5,
        "share_edge_errors": True,
        "connections": 4,
    },
}
TABLES = {  # the dataclass of each, and how errors begin that are in it
    (): (description._Tables, "the file "),
    ("topology",): (description._TopologyTable, "[topology] it "),
    ("sites", "edge"): (description.SiteTable, "[sites.edge] it "),
    ("tunnel",): (description.TunnelTable, "[tunnel] it "),
    ("connect",): (description.ConnectOptions, "[connect] it "),
    ("connect", "compression", "0-1"): (description._CompressionTable, "[connect] compression.0-1 "),
}
LETTERS = st.sampled_from(string.ascii_lowercase + "_")


def table_of(job: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        job = job[name]
    return job


def toml(table: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """Tables last, all keys quoted."""
    lines = ["[" + ".".join(map(json.dumps, path)) + "]"] * bool(path)
    lines += [f"{json.dumps(key)} = {json.dumps(it)}" for key, it in table.items() if type(it) is not dict]
    return "\n".join([*lines, *(toml(it, (*path, key)) for key, it in table.items() if type(it) is dict), ""])


@st.composite
def misspelt(draw: st.DrawFn, word: str) -> str:
    """One character more, less or another, or two that are swapped."""
    at = draw(st.integers(0, len(word) - 1))
    before, rest = word[:at], word[at:]
    return draw(
        st.one_of(
            st.just(before + rest[1:]),
            st.just(before + rest[1:2] + rest[:1] + rest[2:]),
            LETTERS.map(lambda letter: before + letter + rest),
            LETTERS.map(lambda letter: before + letter + rest[1:]),
        ).filter(lambda made: made != word)
    )


def error_of(folder: Path, job: dict[str, Any]) -> str:
    (folder / "job.toml").write_text(toml(job))
    with pytest.raises(ldt.LdtError) as raised:
        read(folder / "job.toml")
    return str(raised.value).removeprefix(f"{folder}/job.toml: ")


def test_all_keys_are_here(tmp_path: Path) -> None:
    for path, (kind, _) in TABLES.items():
        assert {field.name for field in fields(kind)} == {*table_of(JOB, path)}
    (tmp_path / "job.toml").write_text(toml(JOB))
    assert read(tmp_path / "job.toml").connect["outage"] == 5
    pytest.importorskip("torch")
    assert {field.name for field in fields(ldt.Compression)} == LINK.keys()


@given(data=st.data(), others=st.booleans())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_misspelt_key_is_shown_with_its_table_and_what_was_meant(
    tmp_path: Path, data: st.DataObject, others: bool
) -> None:
    """Also where the table has only the keys that it must have, so that more may be meant.

    Of a key of two letters too little may be left for that.
    """
    path = data.draw(st.sampled_from(sorted(TABLES)))
    kind, start = TABLES[path]
    job = copy.deepcopy(JOB)
    table = table_of(job, path)
    key = data.draw(st.sampled_from(sorted(table)))
    wrong = data.draw(misspelt(key).filter(lambda made: made not in table))
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    kept = {name: value for name, value in table.items() if others or len(key) < 3 or name in needed}
    kept.pop(key, None)
    kept[wrong] = table[key]
    table.clear()
    table.update(kept)
    error = error_of(tmp_path, job)
    assert error.startswith(start)
    assert f"has a field {wrong!r} (did you mean {key!r}?): expected" in error


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_misspelt_site_is_shown_with_the_one_that_was_meant(tmp_path: Path, data: st.DataObject) -> None:
    job = copy.deepcopy(JOB)
    name = data.draw(st.sampled_from(sorted(job["sites"])))
    wrong = data.draw(misspelt(name))
    job["sites"][wrong] = job["sites"].pop(name)
    error = error_of(tmp_path, job)
    assert error.startswith(
        f"[sites.{wrong}] is the site of no stage (did you mean {name!r}?): the stages are"
    )


@pytest.mark.parametrize("option", ["transfer", "compression"])
@pytest.mark.parametrize("link", ["01", "0_1", "0-", "-1", "0-1-", "edge-cloud", ""])
def test_what_names_no_link_is_shown(tmp_path: Path, option: str, link: str) -> None:
    job = copy.deepcopy(JOB)
    job["connect"][option] = {link: job["connect"][option]["0-1"]}
    assert error_of(tmp_path, job) == f"[connect] {option} names a link by its stages, '0-1', got {link!r}"


def test_several_are_shown_and_long_ones_cut(tmp_path: Path) -> None:
    job = copy.deepcopy(JOB)
    job["tunnel"] = {"mtuu": 1420, "endpint": "a:1", "y" * 100: 1, "zz": 2}
    error = error_of(tmp_path, job)
    assert error.startswith(
        "[tunnel] it lacks 'endpoint' and has a field 'endpint' (did you mean 'endpoint'?) and"
    )
    assert "has a field 'mtuu' (did you mean 'mtu'?)" in error
    assert f"and has a field {'y' * 40!r}: expected an object with the fields endpoint, mtu" in error
