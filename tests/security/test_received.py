"""Any data in the store or on the control plane gives an error that names its rank, or a short report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

import ldt
from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import parse, plain
from ldt.runtime.common.redact import TEXT_LIMIT
from ldt.runtime.control.control_plane import ControlPlane
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.execution.aliasing import Aliasing
from ldt.runtime.execution.loss import TokenScale
from ldt.runtime.health.desync import DesyncDetector
from ldt.runtime.health.progress import RankStatus
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.runtime.mesh.rendezvous import check_in, share
from ldt.runtime.step.call import all_agree
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3
DEEP = b"[" * 100_000  # json.loads raises RecursionError, which is not a ValueError
FIELD_LIMIT = 4 * TEXT_LIMIT
LONGEST = 3 * FIELD_LIMIT + 500  # of a description: place, error and traceback, and the surrounding text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
report_like = st.fixed_dictionaries(
    dict.fromkeys(("rank", "stage", "replica", "place", "error"), json_values),
    optional=dict.fromkeys(("error_type", "traceback", "more"), json_values),
)
anything = st.binary(max_size=200) | (json_values | report_like).map(lambda value: json.dumps(value).encode())


# -- failure reports -----------------------------------------------------------------------------------------------


def is_short_and_plain(report: FailureReport) -> bool:
    numbers = (report.rank, report.stage, report.replica)
    texts = (report.place, report.error, report.traceback, report.error_type or "")
    return (
        all(number is None or (type(number) is int and number >= 0) for number in numbers)
        and all(type(text) is str and len(text) <= FIELD_LIMIT for text in texts)
        and all(char.isprintable() or char in "\n\t" for text in texts for char in text)
        and len(str(report.as_error())) <= LONGEST
    )


@given(anything)
def test_any_bytes_give_a_report(data: bytes) -> None:
    assert is_short_and_plain(FailureReport.from_text(data))


HOSTILE = [
    DEEP,
    b'{"rank": 0, "stage": 0, "replica": 0, "place": "", "error": "' + b"x" * 1_000_000 + b'"}',
    b"\xff" * 1_000_000,
    b'{"rank": ' + b"9" * 4000 + b', "stage": 0, "replica": 0, "place": "", "error": ""}',
    b'{"rank": true, "stage": 0, "replica": 0, "place": "", "error": ""}',
    b'{"rank": -1, "stage": 0, "replica": 0, "place": "", "error": ""}',
    json.dumps(
        {"rank": 0, "stage": 0, "replica": 0, "place": "\x1b[2J\ud800\u202e", "error": "\x00"}
    ).encode(),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_reports_are_short_and_plain(data: bytes) -> None:
    assert is_short_and_plain(FailureReport.from_text(data))


def test_a_report_survives_a_round_trip() -> None:
    report = FailureReport(2, 1, 0, "action 1F0", "ValueError: no\n\tµ", "ValueError", "File x, line 1\n")
    assert FailureReport.from_text(report.to_text()) == report
    assert FailureReport.from_text(FailureReport.of_unknown("lost").to_text()).rank is None


def test_garbage_where_failures_are_reported_fails_the_mesh() -> None:
    store = HashStore()
    failed: list[FailureReport] = []
    watch = Watchdog(store, "failure", failed.append)
    store.set("failure", DEEP)
    found = watch.wait(60.0)
    watch.close()
    assert found is not None
    assert "unreadable failure report" in found.error


# -- the store -----------------------------------------------------------------------------------------------------

bad_cards = [b"", DEEP, b"[1]", b"5", b"null", b'{"lanes": [1]}', b'{"lanes": {"a": 1}}', b"\xff"]


@pytest.mark.parametrize("card", bad_cards, ids=range(len(bad_cards)))
def test_a_bad_card_names_its_rank(card: bytes) -> None:
    store = HashStore()
    store.set("mesh/here/7", card)
    with pytest.raises(LdtError, match="connect: rank 7 sent malformed data"):
        check_in(store, "mesh", 4, [4, 7], {"lanes": "paired"}, 5.0)


@pytest.mark.parametrize("sent", [b"", DEEP, b"1_0", b"-1", b"true", b"1.5", b"9" * 5000, b'"1"', b"\xff"])
def test_a_bad_index_of_an_output_names_its_rank(sent: bytes) -> None:
    store = HashStore()
    Aliasing(store, "mesh").passes(0, [(0, 3)])
    store.set("mesh/aliasing/step/0/passed/0", sent)
    with pytest.raises(LdtError, match="the rank of chunk 1 sent malformed data"):
        Aliasing(store, "mesh").shares(0, [0])


def test_settings_and_verdicts_of_others_are_truncated() -> None:
    store = HashStore()
    store.set("mesh/here/7", json.dumps({"lanes": "\x1b" + "x" * 100_000}))
    with pytest.raises(LdtError, match="rank 7 has ") as caught:
        check_in(store, "mesh", 4, [4, 7], {"lanes": "paired"}, 5.0)
    assert len(str(caught.value)) < 500
    store.set("other/verdict", b"\xff\x1b" + b"y" * 100_000)
    with pytest.raises(LdtError) as caught:
        check_in(store, "other", 4, [4, 7], {}, 5.0)
    assert len(str(caught.value)) < TEXT_LIMIT + 100
    assert "\x1b" not in str(caught.value)


class Sound:
    """A mesh in which nothing has failed."""

    def check(self) -> None: ...

    def wait(self, seconds: float) -> None: ...


@pytest.mark.parametrize("mine", [{"a": "b"}, True], ids=["texts", "flag"])
@given(data=anything)
def test_shared_values_have_the_expected_type(mine: Any, data: bytes) -> None:
    store = HashStore()
    store.set("k/7", data)
    try:
        _, theirs = share(store, "k", 4, [4, 7], mine, Sound(), time.monotonic() + 5)  # type: ignore[arg-type]
    except LdtError as error:
        assert "rank 7" in str(error)  # noqa: PT017 (one of two ends)
    else:
        assert type(theirs) is type(mine)


@given(anything)
def test_calls_of_other_ranks_are_validated(data: bytes) -> None:
    store = HashStore()
    store.set("call/1", data)
    trouble = DesyncDetector("call", 4).finish(store)
    assert data == b"" or trouble is not None, "no entry is that of this call"
    assert trouble is None or len(trouble.text) < 1000


# -- heartbeats -------------------------------------------------------------------------------------------------

rank_status_like = st.fixed_dictionaries(dict.fromkeys(vars(RankStatus(0)), json_values)).map(json.dumps)


@given(anything | rank_status_like.map(str.encode) | st.just(DEEP))
def test_any_bytes_are_a_rank_status(data: bytes) -> None:
    described = RankStatus.from_text(data).describe()
    assert len(described) < 2000
    assert all(char.isprintable() or char in "\n\t" for char in described)


def test_a_rank_status_with_huge_numbers_says_nothing() -> None:
    fields = {**vars(RankStatus(0)), "seconds": 10**400}
    assert RankStatus.from_text(json.dumps(fields)).beat == -1


# -- edge broadcasts -------------------------------------------------------------------------------------------


@given(st.binary(max_size=64))
def test_any_bytes_are_an_edge_message_or_an_error(data: bytes) -> None:
    try:
        edge_message = EdgeMessage.from_bytes(data)
    except LdtError:
        return
    assert edge_message.to_bytes() == data


@pytest.mark.parametrize(
    "edge_message",
    [EdgeMessage(Subject.TOKENS, 5, b"1"), EdgeMessage(Subject.TOKENS, 6, bytes(8))],
    ids=["length", "call"],
)
def test_a_token_count_is_checked(edge_message: EdgeMessage) -> None:
    class Received:
        def receive(self, tokens: bool) -> list[EdgeMessage]:
            return [edge_message]

    class Fifth:
        number = 5

    scale = TokenScale(Received(), Fifth(), [])  # type: ignore[arg-type]
    with pytest.raises(LdtError, match="expected the number of tokens of call 5"):
        scale.finish(1)


# -- the control plane ---------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[ControlPlane], object]] = {
    "no json": lambda plane: plane._collectives.all_gather(b"{"),
    "deep": lambda plane: plane._collectives.all_gather(DEEP),
    "no envelope": lambda plane: plane._collectives.all_gather(b"[1,2,3]"),
    "another call": lambda plane: plane._collectives.all_gather(json.dumps(["\x1b" * 1000, 0]).encode()),
    "no answer": lambda plane: plane.all_gather([]),
    "no error text": lambda plane: plane.all_gather(
        {"error": 1, "error_type": "", "same": {}, "payload": None}
    ),
    "no names": lambda plane: plane.all_gather(
        {"error": None, "error_type": None, "same": [], "payload": None}
    ),
    "several": lambda plane: plane._collectives.all_gather(b""),
}


def answers_to(wrong: str) -> str:
    """Return the errors of the other ranks if rank 1 sends ``wrong`` in a handshake."""
    with ldt.connect(Topology([1, 1, 1])) as mesh:
        if mesh.rank == 1:
            with suppress(LdtError), mesh.calling("test"):
                WRONG[wrong](mesh.control)
            assert mesh.watchdog.wait(60.0) is not None
            return ""
        try:
            all_agree(mesh, "test", None, {"numbers": "1"})
        except LdtError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_malformed_message_names_its_rank(pool: RankPool, wrong: str) -> None:
    first, _, last = pool.run(answers_to, wrong)
    for text in (first, last):
        assert ("rank 1 sent " in text or "rank 1 is in " in text) == (wrong != "several"), text
        assert text != "nothing"
        assert len(text) < 2000, "with the end of a traceback"
        assert "\x1b" not in text


# -- parsers -----------------------------------------------------------------------------------------------------


@given(anything | st.text())
def test_parse_raises_nothing_but_value_errors(data: bytes | str) -> None:
    try:
        found = parse(data)
    except ValueError:
        return
    assert not isinstance(found, float) or math.isnan(found) or found == float(found)


@given(st.text())
def test_plain_text_can_be_shown_and_stored(text: str) -> None:
    assert len(plain(text, 10)) <= 10
    plain(text).encode()
    assert plain("a\tb\nc é 中 \u2013") == "a\tb\nc é 中 \u2013"
