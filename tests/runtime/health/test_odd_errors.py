"""Odd exceptions raised in a chunk surface there unchanged, and the other ranks name the right rank."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from acting_jobs import chunks_doing
from pipeline_jobs import build
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ldt
from ldt.runtime.common.error_text import plain, safe_str
from ldt.runtime.common.redact import redacted, unredacted
from ldt.runtime.health.failure_detector import is_secondary_error
from ldt.testing import RankPool, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
SECRET = "the patient's name"


def raising(self: Any) -> str:
    raise ZeroDivisionError("in the text")


def exiting(self: Any) -> str:
    raise SystemExit(3)


def recursing(self: Any) -> str:
    return str(self)


def never(self: Any) -> str:
    while True:
        pass


class Text(str):
    """A str whose methods misbehave."""

    def __getitem__(self, key: Any) -> str:
        raise ZeroDivisionError("in a slice")

    def __format__(self, spec: str) -> str:
        raise ZeroDivisionError("in a format")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ZeroDivisionError("no name")

    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise ZeroDivisionError("no module")


class LiarError(RuntimeError):
    """Reports a wrong ``__class__``."""

    @property
    def __class__(self) -> Any:
        return ldt.RemoteStageError

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class ShyError(RuntimeError):
    @property
    def __class__(self) -> Any:
        raise ZeroDivisionError("no class")


@dataclass(frozen=True)
class FrozenError(Exception):
    text: str


def of_cycle() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    one.__context__, two.__context__ = two, one
    return one


def unpicklable() -> BaseException:
    error = ValueError("a function")
    error.function = lambda: None  # type: ignore[attr-defined]
    return error


def of_torch(call: Callable[[], object]) -> Callable[[], BaseException]:
    """An error that torch.distributed raises for a mistake."""

    def make() -> BaseException:
        with pytest.raises(RuntimeError) as caught:
            call()
        return caught.value

    return make


def of_shapes() -> object:
    mesh = DeviceMesh("cpu", [dist.get_rank()])
    part = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    return part.view(5)


def with_text(text: Callable[[Any], Any]) -> Callable[[], BaseException]:
    return type("Boom", (Exception,), {"__str__": text, "__repr__": text})


ERRORS: dict[str, Callable[[], BaseException]] = {
    "its text raises": with_text(raising),
    "its text exits": with_text(exiting),
    "its text is a number": with_text(lambda self: 5),
    "its text recurses": with_text(recursing),
    "its text never ends": with_text(never),
    "its text is odd": with_text(lambda self: Text("odd")),
    "its text is huge": lambda: ValueError("x" * 50_000_000),
    "its text is binary": lambda: ValueError(b"\x00\xff".decode("latin-1") + "\ud800\x1b[2J"),
    "its arguments raise": lambda: ValueError(type("Odd", (), {"__str__": raising, "__repr__": raising})()),
    "its class has no name": Nameless("Odd", (Exception,), {}),
    "its class has a huge name": type("x" * 100_000, (Exception,), {}),
    "it says it is another": lambda: LiarError("gloo/transport/tcp/pair.cc: Connection closed by peer"),
    "it has no class": lambda: ShyError("gloo/transport"),
    "it says it is gloo's": lambda: RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer"),
    "it is of a DTensor's shapes": of_torch(of_shapes),
    "it is of a collective's dtype": of_torch(lambda: dist.all_reduce(torch.ones(1).to(torch.float8_e4m3fn))),
    "it is frozen": lambda: FrozenError("no"),
    "its causes are a cycle": of_cycle,
    "it cannot be pickled": unpicklable,
    "it is a group": lambda: getattr(builtins, "ExceptionGroup", ValueError)(
        "all", [ldt.RemoteStageError("no")]
    ),
    "it ends iterations": lambda: StopIteration(1),
    "it ends generators": GeneratorExit,
    "it exits": lambda: SystemExit(0),
    "it interrupts": KeyboardInterrupt,
    "it is neither": type("Base", (BaseException,), {"__str__": raising}),
}


def caught_in_steps(name: str, chunk: int) -> tuple[bool, str]:
    """Return whether this rank raises its chunk's exception, otherwise the text of its error."""
    thrown: list[BaseException] = []

    def act() -> None:
        thrown.append(ERRORS[name]())
        raise thrown[0]

    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks_doing(TOPOLOGY, chunk, act))
        try:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        except BaseException as error:
            return bool(thrown) and error is thrown[0], "" if thrown else str(error)
    return False, "nothing was raised"


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_raised_as_it_is_and_its_rank_is_named(pool: RankPool, name: str) -> None:
    for chunk in (1, 0):
        answers = pool.run(caught_in_steps, name, chunk)
        for rank, (same, text) in enumerate(answers):
            assert same == (rank == chunk), text
            if not same:
                assert f"rank {chunk} (stage {chunk}, replica 0) failed first in action {chunk}F0 (" in text
                assert len(text) < 12_000
                assert plain(text, len(text)) == text


def timed_out(through: str) -> bool:
    """Whether a collective that the other rank does not join counts as a secondary error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    try:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(torch.ones(1), group=group) if through == "c10d" else functional(group)
            return is_secondary_error(caught.value)
        return True
    finally:
        dist.destroy_process_group(group)


def functional(group: Any) -> None:
    funcol.wait_tensor(funcol.all_reduce(torch.ones(1), "sum", group))


@pytest.mark.parametrize("through", ["c10d", "functional"])
def test_a_collective_that_is_not_joined_is_a_secondary_error(pool: RankPool, through: str) -> None:
    assert pool.run(timed_out, through, ranks=[0, 1]) == [True, True]


# -- what leaves the edge ----------------------------------------------------------------------------------------


class DerivedError(ldt.LdtError):
    """Is derived from an error of the package, whose texts may leave the edge, but not defined by it."""


@pytest.mark.parametrize("kind", [DerivedError, LiarError, ShyError])
def test_errors_derived_from_the_package_s_stay_on_the_edge(kind: type[Exception]) -> None:
    error = kind(SECRET)
    assert SECRET not in redacted(error)
    assert redacted(error).startswith(type(error).__name__)
    assert SECRET in unredacted(error)[0]


def test_a_traceback_that_cannot_be_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise BaseException("no lines")

    monkeypatch.setattr("linecache.getline", broken)
    with pytest.raises(OSError, match="full") as caught:
        raise OSError("the disk is full")
    assert unredacted(caught.value) == ("OSError: the disk is full", "")


def test_reading_an_endless_text_is_given_up() -> None:
    """The thread that reads the text is stopped."""
    before = threading.active_count()
    assert safe_str(ERRORS["its text never ends"]()) == "(its text cannot be read)"
    deadline = time.monotonic() + 20.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def exiting_oddly(code: Any) -> str:
    """A rank leaves its mesh by SystemExit. Returns what the other rank learns of it."""
    with ldt.connect(Topology([1, 1]), ranks=[0, 1]) as mesh:
        if mesh.rank == 1:
            with pytest.raises(SystemExit), mesh:
                raise SystemExit(code() if callable(code) else code)
            return ""
        heartbeats, store = mesh.detector.heartbeats, mesh.watchdog.store
        while mesh.watchdog.first is None and 1 not in heartbeats.probe_liveness(store).closed:
            time.sleep(0.01)
        report = mesh.watchdog.wait(0.3)
        return "" if report is None else report.describe()


class Moody:
    def __bool__(self) -> bool:
        raise ZeroDivisionError("neither")


@pytest.mark.parametrize(("code", "named"), [(0, False), (None, False), (3, True), ("", True), (Moody, True)])
def test_the_exit_code_is_read_without_user_code(pool: RankPool, code: Any, named: bool) -> None:
    text = pool.run(exiting_oddly, code, ranks=[0, 1])[0]
    assert ("rank 1 (stage 1, replica 0) failed first" in text) == named
