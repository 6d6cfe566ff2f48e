"""After an exception every rank raises within seconds and names the first failure. No rank hangs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare

import ldt
from ldt.testing import RankError, RankPool, ToyChunk, in_time, paced, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
SECONDS = 5.0  # by then every rank must have raised


class BoomError(Exception):
    pass


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Failing) -> torch.Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.owner.count("backward")
        return grad, None


class Failing(ToyChunk):
    """Raises, kills its process or sleeps in its n-th forward or backward of the armed step."""

    def __init__(self) -> None:
        super().__init__(16)
        self.armed: tuple[str, int, str] | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            return super().forward(x)
        self.count("forward")
        return _Trap.apply(super().forward(x), self)  # type: ignore[no-any-return,no-untyped-call]

    def count(self, where: str) -> None:
        if self.armed is None or self.armed[0] != where:
            return
        self.calls += 1
        if self.calls - 1 == self.armed[1]:
            if self.armed[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise BoomError(f"no more {where}")


def failing(
    tp: list[int], dp: int, chunk: int, where: str, microbatch: int, policy: Any
) -> tuple[str, float]:
    """A good step, then one in which ``chunk`` fails on its last replica. After that the mesh must reject calls."""
    topology = Topology(tp, dp=dp)
    torch.manual_seed(0)
    chunks = [Failing() for _ in range(topology.num_chunks)]
    with ldt.connect(topology, lanes=policy, ranks=range(topology.world_size)) as mesh:
        pipeline = build(mesh, chunks)
        batch = toy_microbatches(4) if mesh.is_edge else None
        pipeline.step(batch)
        if mesh.replica == dp - 1:
            chunks[chunk].armed = (where, microbatch, "raise")
        start = time.monotonic()
        with pytest.raises((BoomError, ldt.RemoteStageError)) as caught:  # noqa: PT012
            pipeline.step(batch)
            pipeline.step(batch)  # for ranks whose row did not depend on the failure
        seconds = time.monotonic() - start
        for call in (lambda: pipeline.step(batch), lambda: pipeline.eval(batch), mesh.check_usable):
            with pytest.raises(ldt.LdtError, match="cannot be used after a failure; connect again"):
                call()
    with ldt.connect(topology, lanes=policy, ranks=range(topology.world_size)) as mesh:
        again = toy_chunks(topology)
        if dp == 1:
            step_and_compare(mesh, build(mesh, again), again, toy_microbatches(3))
    return f"{type(caught.value).__name__}: {caught.value}", seconds


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_a_chunk_raises(pool: RankPool, chunk: int, where: str, policy: str) -> None:
    answers = pool.run(failing, [1, 1, 1], 1, chunk, where, 2, policy, ranks=range(3))
    stage = chunk % 3
    kind = "F" if where == "forward" else "B"
    for rank, (text, seconds) in enumerate(answers):
        assert in_time(seconds, SECONDS), (rank, seconds)
        if rank == stage:
            assert text.startswith("BoomError: no more")
        else:
            # The second step is refused if the first had ended here and the failure is known already.
            raised = text.replace("this mesh cannot be used after a failure; connect again. ", "", 1)
            assert raised.startswith(
                f"RemoteStageError: rank {stage} (stage {stage}, replica 0) failed first"
            )
            assert f"action {chunk}{kind}2" in text
            # The text of an edge exception stays on the edge.
            what = "BoomError raised at" if stage == 0 else f"BoomError: no more {where}"
            assert f"chunk {chunk}, microbatch 2: {what}" in text
            assert ("no more" in text) == (stage != 0)


def test_a_member_of_a_stage_raises(pool: RankPool) -> None:
    """Both ranks of stage 1 raise the same error; the other stages name the one that failed first."""
    answers = pool.run(failing, [1, 2, 1], 1, 1, "forward", 1, "dedicated")
    for rank in (0, 3):
        assert "(stage 1, replica 0) failed first" in answers[rank][0]
    assert all(in_time(seconds, SECONDS) for _, seconds in answers)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_replica_raises(pool: RankPool, where: str) -> None:
    """The other replica has finished or waits for the reduction; it raises, too."""
    answers = pool.run(failing, [1, 1], 2, 1, where, 3, "dedicated")
    assert answers[3][0].startswith("BoomError")
    assert all("rank 3 (stage 1, replica 1) failed first" in answers[rank][0] for rank in range(3))
    assert all(in_time(seconds, SECONDS) for _, seconds in answers)


def failing_between_steps(who: int) -> tuple[str, float]:
    """One rank fails between steps while the others already wait in the next one."""
    topology = Topology([1, 1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        batch = toy_microbatches(3) if mesh.is_edge else None
        pipeline.step(batch)
        if mesh.rank == who:
            time.sleep(0.5)
            with pytest.raises(BoomError), mesh:
                raise BoomError("the optimizer ran away")
            return "", 0.0
        if mesh.is_edge and who != 0:
            time.sleep(3.0)  # the edge has not even called yet
        start = time.monotonic()
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(batch)
        return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("who", [0, 1, 2])
def test_ranks_that_wait_for_the_next_step_raise(pool: RankPool, who: int) -> None:
    for rank, (text, seconds) in enumerate(pool.run(failing_between_steps, who, ranks=range(3))):
        if rank != who:
            assert (
                f"rank {who} (stage {who}, replica 0) failed first in the code that uses the mesh: Boom"
                in text
            )
            assert in_time(seconds, 2.0)


def failing_loss(share: bool) -> str:
    topology = Topology([1, 1, 1])
    calls: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise BoomError("bad labels")
        return toy_loss(output, target)

    with ldt.connect(topology, ranks=range(3), share_edge_errors=share) as mesh:
        pipeline = build(mesh, toy_chunks(topology), loss_fn, loss_reduction="mean")
        with pytest.raises((BoomError, ldt.RemoteStageError)) as caught:
            pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("share", [False, True])
def test_the_loss_raises(pool: RankPool, share: bool) -> None:
    """The cloud learns the type and place of the error; its text and source lines only with share_edge_errors."""
    answers = pool.run(failing_loss, share, ranks=range(3))
    assert answers[0] == "bad labels"
    for text in answers[1:]:
        assert "action 3F1" in text
        assert "test_failures.py" in text
        assert "in loss_fn" in text
        assert ("BoomError: bad labels" in text) == share
        assert ("bad labels" in text) == share
        assert ("share_edge_errors=True" in text) == (not share)


def token_step_fails(chunk: int) -> str:
    """A chunk fails while the sum over tokens is pending on the control plane."""
    topology = Topology([1, 1, 1])
    torch.manual_seed(0)
    chunks = [Failing() for _ in range(topology.num_chunks)]
    chunks[chunk].armed = ("backward", 0, "raise")
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks, lambda x, y: (toy_loss(x, y), 4), loss_reduction="token")
        with pytest.raises((BoomError, ldt.RemoteStageError)) as caught:
            pipeline.step(toy_microbatches(4) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_step_with_a_pending_sum_fails(pool: RankPool, chunk: int) -> None:
    answers = pool.run(token_step_fails, chunk, ranks=range(3))
    assert answers[chunk % 3] == "no more backward"
    assert all("BoomError" in text for rank, text in enumerate(answers) if rank != chunk % 3)


def interrupted() -> str:
    """Ctrl-C on one rank in the middle of a step."""
    topology = Topology([1, 1, 1])

    class Slow(ToyChunk):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and dist.get_rank() == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(2.0)
            return super().forward(x)

    chunks = [Slow(16) for _ in range(topology.num_chunks)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises((KeyboardInterrupt, ldt.RemoteStageError)) as caught:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_an_interrupt_in_a_step(pool: RankPool) -> None:
    answers = pool.run(interrupted, ranks=range(3))
    assert answers[1].startswith("KeyboardInterrupt")
    assert all("rank 1 (stage 1" in answers[rank] and "KeyboardInterrupt" in answers[rank] for rank in (0, 2))


def killed(chunk: int) -> str:
    topology = Topology([1, 1, 1])
    torch.manual_seed(0)
    chunks = [Failing() for _ in range(topology.num_chunks)]
    with ldt.connect(topology, ranks=[1, 2, 3]) as mesh:  # rank 0 of the world is not in the mesh
        pipeline = build(mesh, chunks)
        batch = toy_microbatches(4) if mesh.is_edge else None
        pipeline.step(batch)
        chunks[chunk].armed = ("forward", 2, "kill")
        start = time.monotonic()
        with pytest.raises((ldt.LdtError, ldt.LaneError)) as caught:
            pipeline.step(batch)
        assert in_time(time.monotonic() - start, SECONDS)
        assert isinstance(caught.value, ldt.RemoteStageError)
        assert (caught.value.rank, caught.value.stage) == (2, 1)
        for words in ("no heartbeat", "killed", "It was last seen"):
            assert words in str(caught.value)
        assert re.search(r"Detected by rank \d: LaneError: lane ", str(caught.value))
        return ""


def test_a_killed_rank_is_named_by_the_others(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(killed, 1, ranks=[1, 2, 3])
    text = str(caught.value)
    assert "rank 2 died with exit code -9" in text
    assert "rank 1 failed" not in text
    assert "rank 3 failed" not in text


def fails_while_connecting() -> str:
    """One rank fails to create its groups: the others must not wait until the deadline."""
    from ldt.runtime.comm import group_set as module

    topology = Topology([1, 1, 1])
    make = module.make_group
    if dist.get_rank() == 2:

        def refuse(name: str, *arguments: Any) -> Any:
            if "lane" in name:
                raise BoomError("no more sockets")
            return make(name, *arguments)

        module.make_group = refuse
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            ldt.connect(topology, ranks=range(3), timeout=paced(3))
    finally:
        module.make_group = make
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_fails_while_connecting(pool: RankPool) -> None:
    answers = pool.run(fails_while_connecting, ranks=range(3))
    assert answers[2] == "BoomError: no more sockets"
    assert all("rank 2" in text and "no more sockets" in text for text in answers[:2]), answers
