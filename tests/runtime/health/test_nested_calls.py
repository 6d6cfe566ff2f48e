"""A call of a mesh inside another one raises at once, and the other ranks learn of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn

import ldt
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.testing.models import on_backward
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
BATCH = toy_microbatches(2)

CALLS: dict[str, Callable[[ldt.Pipeline], Any]] = {
    "step()": lambda pipeline: pipeline.step(BATCH if pipeline.mesh.is_edge else None),
    "eval()": lambda pipeline: pipeline.eval(BATCH if pipeline.mesh.is_edge else None),
    "validate()": lambda pipeline: pipeline.validate(BATCH if pipeline.mesh.is_edge else None),
    "measure_costs()": lambda pipeline: pipeline.measure_costs(),
    "Pipeline()": lambda pipeline: ldt.Pipeline(pipeline.chunks, pipeline.mesh, loss_fn=toy_loss),
    "clip_grad_norm_()": lambda pipeline: ldt.clip_grad_norm_(pipeline.parameters(), 1.0, pipeline.mesh),
    "save_checkpoint()": lambda pipeline: ldt.save_checkpoint("never", pipeline, step=1),
    "load_checkpoint()": lambda pipeline: ldt.load_checkpoint("never", pipeline),
    "close()": lambda pipeline: pipeline.mesh.close(),
    "reconnect()": lambda pipeline: pipeline.mesh.reconnect(),
}


class Calling(ToyChunk):
    """Calls ``act`` in its forward, its backward, or in a hook."""

    def __init__(self) -> None:
        super().__init__(16)
        self.where = ""
        self.act: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        real = type(x) is Tensor
        if self.where == "dry run" or (real and self.where == "forward"):
            self.act()
        if real and self.where == "backward":
            x = on_backward(x, self.act)
        return super().forward(x)

    def arm(self, where: str, act: Callable[[], object]) -> None:
        self.where, self.act = where, act
        if where == "hook":
            self.second.weight.register_hook(lambda grad: act())
        if where == "output_spec":
            self.output_spec = self._output_spec

    def _output_spec(self, x: TensorSpec) -> TensorSpec:
        self.act()
        return x


def calling(where: str, chunk: int, call: str) -> tuple[str, str, bool]:
    """Run a step with another call in user code at ``where``. Returns this rank's error, and if its mesh failed."""
    chunks = [Calling() for _ in range(TOPOLOGY.num_chunks)]
    options: dict[str, Any] = {}

    def act() -> None:
        CALLS[call](pipeline)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss_fn":
            act()
        return toy_loss(output, target)

    def factory(topology: Topology, num_microbatches: int, training: bool) -> ldt.plan.Plan:
        act()
        raise AssertionError("not reached")

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        act()
        yield from BATCH

    with ldt.connect(TOPOLOGY) as mesh:
        if where == "plan_factory":
            options["plan_factory"] = factory
        pipeline = build(mesh, chunks, loss_fn, **options)
        chunks[chunk].arm(where, act)
        with pytest.raises(ldt.LdtError) as caught:  # noqa: PT012
            pipeline.step((data() if where == "data" else BATCH) if mesh.is_edge else None)
            pipeline.step(
                BATCH if mesh.is_edge else None
            )  # for ranks whose row did not depend on the failure
        return type(caught.value).__name__, str(caught.value), mesh.failed


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_forward(pool: RankPool, call: str) -> None:
    name = {"reconnect()": "close()"}.get(call, call)
    answers = pool.run(calling, "forward", 1, call)
    words = f"{name} was called inside step() (call 2), which has not returned"
    assert [kind for kind, *_ in answers] == ["RemoteStageError", "LdtError", "RemoteStageError"]
    assert answers[1][1].startswith(words)
    for _, text, failed in (answers[0], answers[2]):
        assert "rank 1 (stage 1, replica 0) failed first in action 1F0 (" in text
        assert f"): chunk 1, microbatch 0: LdtError: {words}" in text
        assert failed


@pytest.mark.parametrize(
    ("where", "chunk"),
    [
        ("forward", 0),
        ("forward", 3),
        ("backward", 2),
        ("hook", 1),
        ("loss_fn", 0),
        ("output_spec", 2),
        ("dry run", 1),
    ],
)
def test_a_call_in_other_code_of_a_step(pool: RankPool, where: str, chunk: int) -> None:
    answers = pool.run(calling, where, chunk, "step()")
    for rank, (kind, text, failed) in enumerate(answers):
        assert (kind == "RemoteStageError") == (rank != chunk % 3)
        assert rank == chunk % 3 or f"rank {chunk % 3} (stage {chunk % 3}, replica 0) failed first" in text
        assert "step() was called inside step() (call 2), which has not returned" in text
        assert failed


@pytest.mark.parametrize("where", ["plan_factory", "data"])
def test_a_call_before_anything_is_sent(pool: RankPool, where: str) -> None:
    """The step is cancelled, and the mesh stays usable."""
    answers = pool.run(calling, where, 0, "clip_grad_norm_()")
    for rank, (kind, text, failed) in enumerate(answers):
        assert kind == ("RemoteStageError" if rank else "LdtError")
        assert "clip_grad_norm_() was called inside step() (call 2)" in text
        assert not failed


# -- threads -----------------------------------------------------------------------------------------------------


def from_two_threads(call: str) -> tuple[str, str]:
    """Another thread of rank 1 makes a call while its step is in a forward; the others do not."""
    begun, refused = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    class Waiting(ToyChunk):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                begun.set()
                refused.wait(20.0)
            return super().forward(x)

    def other_thread() -> None:
        begun.wait(20.0)
        try:
            CALLS[call](other)
        except ldt.LdtError as error:
            raised.append(error)
        refused.set()

    with ldt.connect(TOPOLOGY) as mesh:
        chunks: list[nn.Module] = toy_chunks(TOPOLOGY)
        other = build(mesh, chunks)
        if mesh.rank == 1:
            chunks[1] = Waiting(16)
        pipeline = build(mesh, chunks)
        thread = threading.Thread(target=other_thread)
        if mesh.rank == 1:
            thread.start()
        text = ""
        try:
            pipeline.step(BATCH if mesh.is_edge else None)
            mesh.check_usable()
        except ldt.LdtError as error:
            text = str(error)
        if mesh.rank == 1:
            thread.join()
        return text, "".join(map(str, raised))


def test_two_threads_step_on_one_mesh(pool: RankPool) -> None:
    answers = pool.run(from_two_threads, "step()")
    words = "step() was called by another thread during step() (call 3), which has not returned"
    assert answers[1][1].startswith(words)
    for text, _ in answers:
        assert f"rank 1 (stage 1, replica 0) failed first in step(): LdtError: {words}" in text


def test_a_mesh_is_not_closed_beneath_another_thread(pool: RankPool) -> None:
    """The step completes."""
    answers = pool.run(from_two_threads, "close()")
    assert answers[1][1].startswith("close() was called by another thread during step() (call 3)")
    assert [text for text, _ in answers] == [""] * 3


def alternating() -> None:
    """Two meshes of one process, used in turn from one thread."""
    with ldt.connect(TOPOLOGY) as one, ldt.connect(TOPOLOGY, lanes="paired") as two:
        jobs = []
        for mesh in (one, two):
            torch.manual_seed(0)
            chunks = toy_chunks(TOPOLOGY)
            jobs.append((mesh, build(mesh, chunks), chunks))
        for _ in range(2):
            for mesh, pipeline, chunks in jobs:
                step_and_compare(mesh, pipeline, chunks, BATCH)


def test_two_meshes_in_turn(pool: RankPool) -> None:
    pool.run(alternating)
