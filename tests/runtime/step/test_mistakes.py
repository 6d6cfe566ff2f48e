"""Tests the advice in errors for mistakes in a chunk, in a loss or in the arguments of connect."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.tensor import DTensor, Replicate

import ldt
import ldt.plan
from ldt.runtime.dry_run.shape_inference import infer_specs
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
TOPOLOGY = Topology([1, 1])
BATCH = toy_microbatches(2)

# -- tensors that wrap others ------------------------------------------------------------------------------------


class Wrapping(ToyChunk):
    """Returns a DTensor, or the result of an unfinished collective; on fake tensors only if ``always``."""

    def __init__(self, kind: str, always: bool) -> None:
        super().__init__(16)
        self.kind = kind
        self.always = always
        self.mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if type(x) is not Tensor and not self.always:
            return y
        if self.kind == "DTensor":
            return DTensor.from_local(y, self.mesh, [Replicate()])
        return AsyncCollectiveTensor(y.detach())


def wrapped(kind: str, always: bool) -> str:
    torch.manual_seed(0)
    chunks = [ToyChunk(16), Wrapping(kind, always), ToyChunk(16)]
    with ldt.connect(TOPOLOGY) as mesh:
        if mesh.rank == 1:
            chunks[1].mesh = mesh.tp_mesh
        with pytest.raises((TypeError, ldt.LdtError)) as caught:
            build(mesh, chunks).step(BATCH if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("kind", ["DTensor", "AsyncCollectiveTensor"])
def test_outputs_that_wrap_tensors_are_refused(pool: RankPool, kind: str, always: bool) -> None:
    for answer in pool.run(wrapped, kind, always):
        assert "output of chunk 1" in answer
        assert f"tensor 0 is a {kind}" in answer
        assert "which cannot be sent to another node" in answer
        assert ("full_tensor() or to_local()" if kind == "DTensor" else "collective * 1.0") in answer


_alone: list[Any] = []  # the group of this rank


class _Copied(torch.autograd.Function):
    """Keeps the values; its gradient is the result of an unfinished collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not _alone:
            return grad
        result = all_reduce(grad, "sum", _alone[0])
        assert type(result) is AsyncCollectiveTensor
        return result


class Copied(ToyChunk):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Copied.apply(x))  # type: ignore[no-untyped-call]


def gradient_of_a_collective() -> None:
    torch.manual_seed(0)
    chunks = [ToyChunk(16), Copied(16), ToyChunk(16)]
    with ldt.connect(TOPOLOGY) as mesh:
        if mesh.rank == 1:
            _alone.append(mesh.tp_mesh.get_group())
        step_and_compare(mesh, build(mesh, chunks), chunks, BATCH)
        _alone.clear()


def test_a_gradient_of_an_unfinished_collective(pool: RankPool) -> None:
    pool.run(gradient_of_a_collective)


# -- losses ------------------------------------------------------------------------------------------------------


def detached(reduction: Any) -> str:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss = toy_loss(output if loss_fn.calls == 0 else output.detach(), target)  # type: ignore[attr-defined]
        loss_fn.calls += 1  # type: ignore[attr-defined]
        return loss if reduction == "mean" else (loss, 4)

    loss_fn.calls = 0  # type: ignore[attr-defined]
    with ldt.connect(TOPOLOGY) as mesh:
        with pytest.raises(ldt.LdtError) as caught:
            build(mesh, toy_chunks(TOPOLOGY), loss_fn, loss_reduction=reduction).step(
                BATCH if mesh.is_edge else None
            )
        return str(caught.value)


@pytest.mark.parametrize("reduction", ["mean", "token"])
def test_a_loss_cut_off_from_the_model(pool: RankPool, reduction: str) -> None:
    for answer in pool.run(detached, reduction):
        assert "the loss of microbatch 1 does not require a gradient although" in answer


def frozen() -> bool:
    chunks = toy_chunks(TOPOLOGY)
    for chunk in chunks:
        chunk.requires_grad_(False)
    with ldt.connect(TOPOLOGY) as mesh:
        result = build(mesh, chunks).step(BATCH if mesh.is_edge else None)
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        return result.loss is not None


def test_a_model_frozen_as_a_whole_may_step(pool: RankPool) -> None:
    assert pool.run(frozen) == [True, False]


# -- texts -------------------------------------------------------------------------------------------------------


class Failing(ToyChunk):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise KeyError("no such thing")
        return super().forward(x)


def printed() -> str:
    torch.manual_seed(0)
    chunks = [ToyChunk(16), Failing(16), ToyChunk(16)]
    with ldt.connect(TOPOLOGY) as mesh:
        try:
            build(mesh, chunks).step(BATCH if mesh.is_edge else None)
        except (KeyError, ldt.LdtError) as error:
            return "".join(traceback.format_exception(error))
    return ""


def test_a_remote_rank_prints_the_report_once(pool: RankPool) -> None:
    text = pool.run(printed)[0]
    assert text.count("failed first") == 1
    assert "LaneError" not in text
    assert "direct cause" not in text
    assert "During handling" not in text


class Mistyped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no attribute heads.")


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class ToNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


@pytest.mark.parametrize(
    ("kind", "advice"), [(Mistyped, False), (Reading, True), (Selecting, True), (ToNumpy, True)]
)
def test_only_chunks_that_read_values_are_advised_to_declare(kind: type[nn.Module], advice: bool) -> None:
    with pytest.raises(ldt.LdtError) as caught:
        infer_specs(1, kind(), (torch.ones(2, 4),), {}, torch.device("cpu"), training=True)
    text = str(caught.value)
    assert f"cannot tell what chunk 1 ({kind.__name__}) returns for float32[2, 4]" in text
    assert ("declare the result" in text) == advice
    assert ".." not in text
    assert advice or text.endswith("ValueError: no attribute heads")


# -- devices and plans -------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices for it")
@pytest.mark.parametrize("option", ["backend", "device"])
def test_a_missing_device(option: str) -> None:
    options: Any = {"backend": "nccl"} if option == "backend" else {"device": "cuda"}
    with pytest.raises(ValueError, match=r"'(nccl|cuda)'.* this process has none: install"):
        ldt.connect(Topology([1]), **options)


def default_backends() -> str:
    config = dist.get_backend_config
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    try:
        with ldt.connect(TOPOLOGY) as mesh:
            return mesh.device.type
    finally:
        dist.get_backend_config = config


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices for it")
def test_a_default_group_for_both_uses_the_available_device(pool: RankPool) -> None:
    assert pool.run(default_backends) == ["cpu", "cpu"]
