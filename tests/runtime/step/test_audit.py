"""Tests that samples, labels and losses never leave the edge, and that the audit logs everything that does."""

from __future__ import annotations

import json
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.runtime.step.audit import Guard
from ldt.runtime.step.microbatch import Microbatch
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 4
IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])


class Leaking(nn.Module):
    """A head that also returns a part of the sample."""

    def __init__(self, leak: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.leak = leak

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), self.leak(ids)


class Passing(ToyChunk):
    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return super().forward(x), *others


class Ending(ToyChunk):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x)


LEAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda ids: ids,
    "a view": lambda ids: ids[:, 1:],
    "transposed": lambda ids: ids.t(),
    "as bytes": lambda ids: ids.view(torch.uint8),
    "a copy": lambda ids: ids.clone(),
    "as another type": lambda ids: ids.float(),
    "a sum": lambda ids: ids.sum(-1),
}


def leaking(leak: str, audit: str | None) -> str:
    topology = Topology([1, 1, 1])
    chunks = [Leaking(LEAKS[leak]), Passing(16), Passing(16), Ending(16)]
    with ldt.connect(topology, ranks=range(3)) as mesh:
        pipeline = build(mesh, chunks, audit=audit)
        batch = [(IDS, torch.zeros(2, 3, 16))] * 2
        try:
            pipeline.step(batch if mesh.is_edge else None)
        except (ValueError, ldt.LdtError) as error:
            return str(error)
        return "sent"


@pytest.mark.parametrize("leak", ["itself", "a view", "transposed", "as bytes"])
def test_inputs_do_not_leave(pool: RankPool, leak: str) -> None:
    for text in pool.run(leaking, leak, None, ranks=range(3)):
        assert "output of chunk 0 for microbatch 0 would send the inputs of microbatch 0 to the cloud" in text


@pytest.mark.parametrize("leak", ["a copy", "as another type"])
def test_an_audit_finds_copies(pool: RankPool, leak: str, tmp_path: Path) -> None:
    assert pool.run(leaking, leak, None, ranks=range(3)) == ["sent"] * 3
    for text in pool.run(leaking, leak, str(tmp_path / "audit.jsonl"), ranks=range(3)):
        assert "would send a copy of the inputs of microbatch 0 to the cloud" in text


def test_outputs_of_layers_may_leave(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(leaking, "a sum", str(tmp_path / "audit.jsonl"), ranks=range(3)) == ["sent"] * 3


class Remembering(ToyChunk):
    """A head that also returns a tensor from a list."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__(16)
        self.found = found

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.found[0] if self.found else torch.zeros(())


def leaking_a_loss() -> str:
    """Send the loss of the first step in the second one."""
    topology = Topology([1, 1])
    found: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = toy_loss(output, target)
        found[:] = [loss.detach()]
        return loss

    chunks = [Remembering(found), Passing(16), Ending(16)]
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, loss_fn)
        pipeline.eval(toy_microbatches(1) if mesh.is_edge else None)
        with pytest.raises((ValueError, ldt.LdtError)) as caught:
            pipeline.step(toy_microbatches(1) if mesh.is_edge else None)
        return str(caught.value)


def test_losses_do_not_leave(pool: RankPool) -> None:
    for text in pool.run(leaking_a_loss, ranks=range(2)):
        assert "would send a loss of the step before to the cloud" in text


def test_a_loss_is_protected_as_long_as_it_is_alive() -> None:
    guard = Guard([])
    loss, gone = torch.zeros(3).sum(), torch.zeros(3).sum()
    held = weakref.ref(gone.untyped_storage())
    guard.add_loss(0, loss)
    guard.add_loss(1, gone)
    del gone
    assert held() is None, "the guard holds it"
    for later in (guard, Guard([], earlier=guard)):
        with pytest.raises(ValueError, match=r"would send .*loss of"):
            later.check([loss], "something")
        later.check([torch.zeros(()) for _ in range(100)], "where the other one was")


def test_targets_and_nested_inputs_are_protected() -> None:
    target, nested = torch.randn(4), torch.randn(3, 3)
    guard = Guard([Microbatch((), {"options": [{"weights": nested}]}, (target, 1))])
    for tensor, what in ((target[1:], "target"), (nested[0], "inputs")):
        with pytest.raises(ValueError, match=f"would send the {what} of microbatch 0"):
            guard.check([torch.ones(2), tensor], "something")
    guard.check([torch.empty(0), target[:0], target * 1], "something")


def audited(path: str | None, tp: list[int], token: bool) -> list[dict[str, float]]:
    topology = Topology(tp)
    chunks = toy_chunks(topology)
    options: dict[str, Any] = {"loss_reduction": "token"} if token else {}
    loss = (lambda x, y: (toy_loss(x, y), 5)) if token else toy_loss
    with ldt.connect(topology, ranks=range(sum(tp))) as mesh:
        pipeline = build(mesh, chunks, loss, audit=path if mesh.is_leader else None, **options)
        lanes: dict[str, float] = {}
        for batch in (toy_microbatches(3), toy_microbatches(2, batch=7)):
            result = pipeline.step(batch if mesh.is_edge else None)
            for name, lane in result.stats.lanes.items():
                lanes[name] = lanes.get(name, 0.0) + lane["sent_bytes"]
        mesh.control.all_gather(None)
        broadcast = sum(lane.stats()["sent_bytes"] for lane in mesh.edge_broadcast.lanes())
        return [lanes, {"broadcast": broadcast}]


@pytest.mark.parametrize("token", [False, True])
def test_the_audit_logs_every_byte(pool: RankPool, token: bool, tmp_path: Path) -> None:
    """The file accounts for each byte that the edge's lanes sent in steps."""
    path = tmp_path / "audit.jsonl"
    lanes, broadcasts = pool.run(audited, str(path), [1, 1, 1], token, ranks=range(3))[0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_purpose: dict[str, int] = {}
    for line in lines:
        by_purpose[line["purpose"]] = by_purpose.get(line["purpose"], 0) + line["bytes"]
    shapes = [3 * 4 * 16 * 4, 2 * 7 * 16 * 4]
    assert by_purpose["activation"] == by_purpose["gradient"] == sum(shapes)
    assert by_purpose["activation"] + by_purpose["gradient"] == sum(lanes.values())
    peers = 2
    metadata_bytes = by_purpose["metadata"] + by_purpose.get("tokens", 0)
    assert peers * metadata_bytes == broadcasts["broadcast"]
    assert ("tokens" in by_purpose) == token
    first = next(line for line in lines if line["purpose"] == "activation")
    assert first == {
        "call": 1,
        "purpose": "activation",
        "bytes": 4 * 16 * 4,
        "channel": "F0:0.0->1.0",
        "microbatch": 0,
        "tensor": 0,
        "shape": [4, 16],
        "dtype": "float32",
    }
    assert {line["call"] for line in lines} == {1, 2}


def existing(path: str) -> str:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh, pytest.raises((OSError, ldt.LdtError)) as caught:
        build(mesh, toy_chunks(topology), audit=path)
    return str(caught.value)


def test_an_audit_file_is_not_overwritten(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("mine\n")
    own, other = pool.run(existing, str(path), ranks=range(2))
    assert f"the audit file exists and is never overwritten: choose a new path, got {path}" in own
    assert "the audit file exists and is never overwritten" in other
    assert str(path) not in other
    assert path.read_text() == "mine\n"


class Returning(torch.autograd.Function):
    """Returns a given tensor as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def leaking_a_label(copies: bool, path: str) -> str:
    """Return the label itself, or a copy of it, as the gradient of the tail's input."""
    topology = Topology([1, 1])

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum() if copies else Returning.apply(output, target).sum()

    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(
            mesh, [ToyChunk(16), ToyChunk(16), Identity()], loss_fn, audit=path if copies else None
        )
        with pytest.raises((ValueError, ldt.LdtError)) as caught:  # noqa: PT012
            batch = [(x.clone(), y.clone()) for x, y in toy_microbatches(1)]  # with memory of their own
            pipeline.step(batch if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("copies", [False, True])
def test_labels_do_not_leave_as_gradients(pool: RankPool, copies: bool, tmp_path: Path) -> None:
    what = "a copy of the target" if copies else "the target"
    for text in pool.run(leaking_a_label, copies, str(tmp_path / "audit.jsonl"), ranks=range(2)):
        assert f"gradient of the input of chunk 2 for microbatch 0 would send {what} of microbatch 0" in text


class Naming(ToyChunk):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Embedding(nn.Embedding):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


def metadata_that_are_samples() -> str:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=range(2)) as mesh:
        pipeline = build(mesh, [Embedding(10, 16), Naming(16), ToyChunk(16)])
        inputs = {"input_ids": IDS, "attention_mask": IDS[:, :2]}
        with pytest.raises((ValueError, ldt.LdtError)) as caught:
            pipeline.step([(inputs, torch.zeros(2, 3, 16))] if mesh.is_edge else None)
        return str(caught.value)


def test_samples_are_refused_as_metadata(pool: RankPool) -> None:
    for text in pool.run(metadata_that_are_samples, ranks=range(2)):
        assert "metadata of microbatch 0 would send the inputs of microbatch 0" in text


def test_memory_is_protected_in_every_container() -> None:
    """Arrays, mappings, and tensors over a part of the same memory with their own storage."""
    array, held = numpy.arange(12.0), torch.arange(12.0)
    guard = Guard([Microbatch(({"a": UserDict(x=held)}, array), {}, None)])
    for tensor in (torch.from_numpy(array[3:]), torch.from_numpy(held.numpy()[5:]), held[2:].view(2, 5)):
        with pytest.raises(ValueError, match="would send the inputs of microbatch 0"):
            guard.check([tensor], "something")
    guard.end()
    guard.check([held], "something")


def test_the_rest_of_a_shared_buffer_may_leave() -> None:
    """A part of a buffer is the sample: the whole buffer must not leave, the other parts may."""
    buffer = torch.arange(12.0)
    guard = Guard([Microbatch((buffer[4:8],), {}, None)])
    guard.check([buffer[:4], buffer[8:]], "something")
    for tensor in (buffer, buffer[6:], buffer[7:8], buffer[::3]):
        with pytest.raises(ValueError, match="would send the inputs of microbatch 0"):
            guard.check([tensor], "something")


def test_complex_samples_are_guarded() -> None:
    sample = torch.randn(6, dtype=torch.complex64)
    guard = Guard([Microbatch((sample,), {}, None)], copies=True)
    for tensor in (sample, torch.view_as_real(sample), sample.clone(), sample.to(torch.complex128)):
        with pytest.raises(ValueError, match="the inputs of microbatch 0"):
            guard.check([tensor], "something")
    guard.check([sample * 2], "something")


def test_equal_constants_are_no_copies() -> None:
    guard = Guard([Microbatch((), {}, torch.zeros(4))], copies=True)
    guard.check([torch.zeros(4)], "something")
