"""Failure reports: they name the global rank, and redact what must not leave the edge."""

from __future__ import annotations

import pickle
import threading
import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.runtime.comm import group_set
from ldt.runtime.common.redact import QuotingError, redacted
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology
from ldt.train.checkpoint.layout import StorageError

WORLD_SIZE = 4
SECRET = "the patient's name"


class BoomError(Exception):
    pass


# -- attributes --------------------------------------------------------------------------------------------------


class Failing(ToyChunk):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise BoomError("no")
        return super().forward(x)


Facts = tuple[int | None, int | None, str | None, str | None]


def facts(how: str) -> list[Facts]:
    """The attributes of this rank's RemoteStageErrors: in the failing call, and in the next one."""
    topology = Topology([1, 1])
    chunks: list[nn.Module] = toy_chunks(topology)
    if how == "a chunk":
        chunks[1] = Failing(16)
    found: list[Facts] = []
    with ldt.connect(topology, ranks=[3, 1]) as mesh:
        if how == "building":
            chunks = chunks[: 2 if mesh.is_edge else 3]
            calls = [lambda: ldt.Pipeline(chunks[:2], mesh)]
        else:
            pipeline = build(mesh, chunks)
            batch = ([] if how == "no microbatches" else toy_microbatches(2)) if mesh.is_edge else None
            calls = [lambda: pipeline.step(batch)] * 2
        for call in calls:
            with pytest.raises((BoomError, ValueError, ldt.LdtError)) as caught:
                call()  # type: ignore[no-untyped-call]
            error = caught.value
            if isinstance(error, ldt.RemoteStageError):
                found.append((error.rank, error.stage, error.place, error.error_type))
    return found


def test_a_remote_error_has_the_facts_as_attributes(pool: RankPool) -> None:
    at_edge, at_cloud = pool.run(facts, "a chunk", ranks=[3, 1])
    place = "action 1F0 (5 of 12): chunk 1, microbatch 0"
    assert at_edge == [(1, 1, place, "BoomError")] * 2
    assert at_cloud == []
    at_edge, at_cloud = pool.run(facts, "no microbatches", ranks=[3, 1])
    assert at_cloud == [(3, 0, "the beginning of step()", "InputValueError")] * 2
    at_edge, at_cloud = pool.run(facts, "building", ranks=[3, 1])
    assert at_edge == [(1, 1, "the beginning of Pipeline()", "InputValueError")]


# -- global ranks ------------------------------------------------------------------------------------------------


def missing_message() -> str:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=[3, 1], transfer_timeout=timedelta(seconds=0.5)) as mesh:
        if mesh.rank == 0:
            mesh.watchdog.wait(60.0)
            return ""
        with pytest.raises(ldt.LdtError) as caught, mesh:
            mesh.control.broadcast(None, ldt.Node(0, 0))
        return str(caught.value)


def test_a_missing_message_names_a_global_rank(pool: RankPool) -> None:
    assert "waited 0.5 s for a message of rank 3" in pool.run(missing_message, ranks=[3, 1])[1]


def unequal_modules() -> str:
    topology = Topology([1, 2])
    chunks: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8), nn.LazyLinear(8)]
    with ldt.connect(topology, ranks=[3, 2, 1]) as mesh:
        if mesh.rank == 2:
            chunks[1] = nn.Linear(8, 4)
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, chunks, check_weights=False).step(
                toy_microbatches(2, width=8) if mesh.is_edge else None
            )
        return str(caught.value)


def test_a_disagreement_names_global_ranks(pool: RankPool) -> None:
    text = pool.run(unequal_modules, ranks=[3, 2, 1])[2]
    assert "rank 1 says float32[4, 4] with grad" in text
    assert "topology rank" not in text


# -- what leaves the edge ----------------------------------------------------------------------------------------


def boom(value: str) -> None:
    raise BoomError(f"cannot read {value}")


def test_only_type_and_place_of_a_user_exception_may_leave() -> None:
    with pytest.raises(BoomError) as caught:
        boom(SECRET)
    report = FailureReport.of(caught.value, 0, 0, 0, "somewhere", in_full=False)
    text = report.to_text()
    assert SECRET not in text
    assert "cannot read" not in text, "no source lines either"
    assert "BoomError raised at" in report.error
    assert "test_failure_reports.py:" in report.error
    assert "in boom" in report.error
    full = FailureReport.of(caught.value, 0, 0, 0, "somewhere", in_full=True)
    assert SECRET in full.error
    assert "in boom" in full.traceback


def test_texts_of_the_package_may_leave() -> None:
    for error in (ldt.LdtError("float32[4]"), ldt.LaneError("float32[4]"), ldt.PlanError("float32[4]")):
        assert redacted(error) == f"{type(error).__name__}: float32[4]"
    assert SECRET not in redacted(KeyError(SECRET))


def test_a_quoting_error_is_an_ldt_error_to_users() -> None:
    error = QuotingError(f"a text with {SECRET}", plain="a text")
    assert traceback.format_exception_only(error) == [f"ldt.errors.LdtError: a text with {SECRET}\n"]
    assert redacted(error) == "LdtError: a text"
    assert FailureReport.of(error, 0, 0, 0, "somewhere", in_full=False).error_type == "LdtError"
    assert type(pickle.loads(pickle.dumps(error))) is ldt.LdtError


def test_errors_survive_pickling() -> None:
    remote = ldt.RemoteStageError("a text", rank=3, stage=1, place="the forward", error_type="KeyError")
    for error in (ldt.NonFiniteError("a text", chunk=2, microbatch=5), remote):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), vars(copied)) == (type(error), "a text", vars(error))
    stored = pickle.loads(pickle.dumps(StorageError("a text", plain="a text")))
    assert (type(stored), str(stored)) == (ldt.CheckpointError, "a text")


class Reading(nn.Module):
    """Fails during shape inference, over an input that is not a tensor."""

    def forward(self, x: Tensor, name: str) -> Tensor:
        raise BoomError(f"cannot read {name}")


def failing_head(share: bool) -> str:
    topology = Topology([1, 1])
    chunks = [Reading(), ToyChunk(16), ToyChunk(16)]
    batch: list[Any] = [((x, SECRET), y) for x, y in toy_microbatches(2)]
    with ldt.connect(topology, ranks=[0, 1], share_edge_errors=share) as mesh:
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, chunks).step(batch if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("share", [False, True])
def test_a_rejection_quotes_no_value_unless_errors_are_shared(pool: RankPool, share: bool) -> None:
    at_edge, at_cloud = pool.run(failing_head, share, ranks=[0, 1])
    assert SECRET in at_edge
    assert "cannot tell what chunk 0 (Reading) returns for float32[4, 16]" in at_cloud
    assert "LdtError: cannot tell" in at_cloud, "users know no other name of it"
    assert (SECRET in at_cloud) == share
    assert ("BoomError: cannot read" in at_cloud) == share


def failing_in_the_script(at: int, share: bool) -> str:
    with ldt.connect(Topology([1, 1]), ranks=[0, 1], share_edge_errors=share) as mesh:
        if mesh.rank == at:
            with pytest.raises(BoomError), mesh:
                boom(SECRET)
            return ""
        report = mesh.watchdog.wait(60.0)
        assert report is not None
        return report.to_text()


@pytest.mark.parametrize(("at", "share"), [(0, False), (0, True), (1, False)])
def test_exceptions_between_steps(pool: RankPool, at: int, share: bool) -> None:
    text = pool.run(failing_in_the_script, at, share, ranks=[0, 1])[1 - at]
    assert "BoomError" in text
    assert (SECRET in text) == (share or at == 1), "a cloud rank sends its error in full"


# -- the watch itself --------------------------------------------------------------------------------------------


class BrokenStore:
    def check(self, keys: list[str]) -> bool:
        raise ConnectionError("connection reset by peer")


def test_a_lost_store_names_no_rank() -> None:
    watch = Watchdog(BrokenStore(), "failure", lambda report: None)
    report = watch.wait(60.0)
    watch.close()
    assert report is not None
    text = report.describe()
    assert text.startswith("the mesh has failed: the store of the process group has not answered for 1 s")
    assert "connection reset by peer" in text
    assert "restart the job" in text
    assert "-1" not in text
    with pytest.raises(ldt.RemoteStageError) as caught:
        watch.check()
    assert (caught.value.rank, caught.value.stage, caught.value.error_type) == (None, None, None)


def test_an_unreadable_report_is_reported() -> None:
    report = FailureReport.from_text(b"{nonsense")
    assert report.rank is None
    assert "nonsense" in report.describe()


def test_an_error_of_the_handler_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not mistaken for a store error."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    store = dist.HashStore()

    def broken(report: FailureReport) -> None:
        raise BoomError("lanes")

    watch = Watchdog(store, "failure", broken)
    store.set("failure", FailureReport(1, 1, 0, "x", "y").to_text())
    first = watch.wait(60.0)
    watch.close()
    assert first is not None
    assert first.rank == 1
    assert [str(error) for error in seen] == ["lanes"]


class Stuck:
    """A lane or a group that can neither be aborted nor closed."""

    def __init__(self, name: str, ended: list[str], error: type[BaseException] | None) -> None:
        self.name = name
        self._ended = ended
        self._error = error

    def abort(self, reason: str = "") -> None:
        self._ended.append(f"abort {self.name}")
        if self._error is not None:
            raise self._error(f"{self.name} is stuck")

    def close(self, timeout: timedelta) -> None:
        self._ended.append(f"close {self.name}")
        if self._error is not None:
            raise self._error(f"{self.name} is stuck")


@pytest.mark.parametrize("kind", [BoomError, KeyboardInterrupt])
def test_every_lane_is_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    ended: list[str] = []
    with ldt.connect(Topology([1])) as mesh:
        lanes = [Stuck("first", ended, kind), Stuck("second", ended, kind), Stuck("third", ended, None)]
        monkeypatch.setattr(mesh._lane_set, "_watched", tuple(lanes))
        monkeypatch.setattr(mesh._groups, "_groups", {"groups": Stuck("groups", ended, None)})
        mesh.watchdog.publish(FailureReport(0, 0, 0, "here", "x"))
    assert ended[:4] == ["abort first", "abort second", "abort third", "abort groups"]
    assert "could not abort lane first" in caplog.text
    assert "could not abort lane second" in caplog.text


def closing() -> tuple[list[str], str, bool, list[str]]:
    """Two of three fake lanes and one group cannot be closed; everything else is closed nevertheless."""
    ended: list[str] = []
    mesh = ldt.connect(Topology([1, 1]), ranks=[0, 1])
    broadcasts, groups, control = mesh.edge_broadcast.lanes(), mesh._groups, mesh.control
    lanes = mesh.all_lanes()
    stuck: list[Any] = [Stuck("one", ended, BoomError), *lanes, Stuck("two", ended, ValueError)]
    mesh._lane_set.all = lambda: stuck  # type: ignore[method-assign]
    unregister = group_set._unregister

    def refuse(group: Any, *, abort: bool) -> None:
        unregister(group, abort=abort)
        if len(groups) == 3:
            raise OSError("a group is stuck")

    with (
        mock.patch.object(group_set, "_unregister", refuse),
        pytest.raises(BoomError) as caught,
    ):
        mesh.close()
    states = []
    for lane in [*lanes, *broadcasts]:
        with pytest.raises(ldt.LaneError) as refused:
            lane.send([torch.zeros(1)], 1 - mesh.rank)
        states.append(str(refused.value))
    mesh.close()
    return ended, str(caught.value), len(groups) == 0 and control is not None, states


def test_a_lane_or_group_that_fails_to_close_does_not_stop_the_rest(pool: RankPool) -> None:
    for ended, first, dropped, states in pool.run(closing, ranks=[0, 1]):
        assert ended == ["close one", "close two"]
        assert first == "one is stuck"
        assert dropped
        assert states
        assert all("closed" in text for text in states), states


def test_force_abort_is_called_whatever_the_handler_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    store = dist.HashStore()

    def handler(report: FailureReport) -> None:
        raise BoomError("lanes")

    watch = Watchdog(store, "failure", handler, force_abort=broken.set)
    store.set("failure", FailureReport(1, 1, 0, "x", "y").to_text())
    assert broken.wait(20.0)
    watch.close()
