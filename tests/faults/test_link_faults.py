"""Injects faults of the link between two sites: one in CI, nine with `make slow`, more with `make faults`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from faults.leak_check import reset
from faults.link_fault import LINK_KINDS, draw_link

if TYPE_CHECKING:
    from faults.link_harness import LinkHarness

SEEDS = range(len(LINK_KINDS))
QUICK = (1,)
CONNECTING = (16, 100)  # the link stays down as ranks check in, or make groups


@pytest.fixture(scope="module")
def link_harness() -> Iterator[LinkHarness]:
    from faults.link_harness import LinkHarness

    with LinkHarness() as made:
        yield made


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.slow) for seed in (*SEEDS, *CONNECTING)],
    ids="seed-{}".format,
)
@pytest.mark.usefixtures("wide_area")
def test_a_fault_of_the_link(request: pytest.FixtureRequest, seed: int) -> None:
    """Rerun one: `python -m pytest tests/faults -k seed-3`, or `make faults ARGS="--link --seeds 17"`."""
    request.getfixturevalue("link_harness").run(seed).check()


def test_consecutive_seeds_take_all_kinds() -> None:
    assert [draw_link(seed).kind for seed in SEEDS] == [kind for kind, *_ in LINK_KINDS]
    assert {draw_link(seed).point for seed in range(40)} == {
        "connect",
        "action",
        "data",
        "optimizer",
        "save",
        "close",
    }


def test_a_reset_ends_a_connection_at_both_ends() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        with other:
            reset(one)
            with pytest.raises(ConnectionResetError):
                other.recv(1)
            with pytest.raises(ConnectionResetError):
                one.send(b"x")
