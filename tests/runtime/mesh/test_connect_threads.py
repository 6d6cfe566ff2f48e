"""Several threads of a rank connect, or use, one mesh each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch import nn

import ldt
from ldt.testing import RankPool, in_time, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
PAIR = Topology([1, 1])
BATCH = toy_microbatches(2)
WORDS = "is connecting another mesh in another thread: connect meshes one after the other"


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """Run each in a thread and return its result, or the exception it raises."""
    found: list[Any] = [None] * len(acts)

    def run(index: int) -> None:
        try:
            found[index] = acts[index]()
        except ldt.LdtError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def connect_and_step(ranks: list[int], chunks: Sequence[nn.Module]) -> str:
    with ldt.connect(PAIR, ranks=ranks) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, BATCH)
    return "stepped"


def connect_in_turn(meshes: list[list[int]]) -> list[str]:
    """Connect each of ``meshes``, by its ranks, in a thread; each starts while the previous one waits for peers.

    The models are built before the threads start: all threads draw from torch's one random generator.
    """
    models = [toy_chunks(PAIR) for _ in meshes]

    def act(index: int) -> str:
        time.sleep(0.2 * index)
        return connect_and_step(meshes[index], models[index])

    return [str(answer) for answer in in_threads(*(partial(act, index) for index in range(len(meshes))))]


def at_once(orders: list[list[list[int]]]) -> tuple[list[str], float]:
    start = time.monotonic()
    found = connect_in_turn(orders[dist.get_rank()])
    return found, time.monotonic() - start


def test_threads_connect_over_the_same_ranks(pool: RankPool) -> None:
    for found, _ in pool.run(at_once, [[[0, 1], [0, 1]]] * 2, ranks=[0, 1]):
        assert found[0] == "stepped"
        assert found[1] == "stepped" or WORDS in found[1]


def test_threads_connect_in_another_order_on_each_rank(pool: RankPool) -> None:
    """Each mesh is connected on both ranks, or refused on both long before its timeout."""
    for found, seconds in pool.run(at_once, [[[0, 1], [1, 0]], [[1, 0], [0, 1]]], ranks=[0, 1]):
        assert all(answer == "stepped" or WORDS in answer for answer in found), found
        assert in_time(seconds, 20.0)


def test_the_peers_of_a_refused_connect_raise(pool: RankPool) -> None:
    (first, second), one, other = (
        found for found, _ in pool.run(at_once, [[[0, 1], [0, 2]], [[0, 1]], [[0, 2]]])
    )
    assert [first] == one == ["stepped"]
    assert [second] == other
    assert second == "stepped" or f"rank 0 {WORDS}" in second


def steps_in_two_threads() -> list[str]:
    """They connect one after the other and step at the same time; a failed one reconnects while the other steps."""
    one = ldt.connect(PAIR, ranks=[0, 1])
    two = ldt.connect(PAIR, ranks=[0, 1], lanes="paired")
    failed = threading.Event()
    steady, restarted = toy_chunks(PAIR), toy_chunks(PAIR)

    def keep_stepping() -> str:
        with one:
            pipeline = build(one, steady)
            for _ in range(20):
                step_and_compare(one, pipeline, steady, BATCH)
        return "stepped"

    def fail_and_reconnect() -> str:
        if two.rank == 1:
            two.detector.publish(ValueError("no more"))
        assert two.watchdog.wait(10.0) is not None
        failed.set()
        with two.reconnect() as again:
            step_and_compare(again, build(again, restarted), restarted, BATCH)
        return "stepped"

    return [str(answer) for answer in in_threads(keep_stepping, fail_and_reconnect)]


def test_meshes_of_two_threads(pool: RankPool) -> None:
    for found in pool.run(steps_in_two_threads, ranks=[0, 1]):
        assert found == ["stepped", "stepped"]
