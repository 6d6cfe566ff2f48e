"""The first step of processes that have not used their GPUs before."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from sharing import my_device
from torch import nn

import ldt
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH = 1024


class Attention(nn.Module):
    """Uses what libraries load at its first launch: products in bf16, attention, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768, dtype=torch.bfloat16)
        self.mix = nn.Conv1d(256, 256, 3, padding=1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return x + self.mix(y.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def first_steps_of_attention(tp: list[int], transport: TransportChoice) -> list[float]:
    device = my_device()
    topology = ldt.Topology(tp)
    with ldt.connect(topology, "nccl", device=device, transport=transport) as mesh:
        torch.manual_seed(0)
        chunks = [Attention().to(device) for _ in range(topology.num_chunks)]
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=nn.functional.mse_loss)
        losses = []
        for length in (256, 200):  # other kernels for other shapes
            batch = list(torch.rand(6, 2, 4, length, 256, device=device, dtype=torch.bfloat16).unbind())
            result = pipeline.step([tuple(pair) for pair in batch] if mesh.is_edge else None)
            losses += [loss.item() for loss in result.losses or ()]
        return losses


@pytest.mark.parametrize(
    ("tp", "transport"),
    [
        ([1, 1], "nccl"),
        ([1, 1], "c10d"),
        ([1, 1], "copy_engine"),
        ([1, 2], "host"),
        ([1, 2], "copy_engine"),
        ([1, 2], "nccl"),
    ],
    ids=str,
)
def test_steps_end_while_libraries_load_kernels(tp: list[int], transport: TransportChoice) -> None:
    with RankPool(sum(tp)) as pool:
        losses, *others = pool.run(first_steps_of_attention, tp, transport, timeout=60)
    assert len(losses) == 12
    assert all(map(math.isfinite, losses))
    assert others == [[]] * len(others)


def first_step(transport: TransportChoice) -> list[float]:
    device = my_device()
    with ldt.connect(ldt.Topology([1, 1]), "nccl", device=device, transport=transport) as mesh:
        chunks = toy_chunks(mesh.topology, width=WIDTH)
        mine = [chunks[index].to(device) for index in mesh.topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss)
        batch = toy_microbatches(8, width=WIDTH, batch=WIDTH)
        given = [(x.to(device), y.to(device)) for x, y in batch]
        result = pipeline.step(given if mesh.is_edge else None)
        return [loss.item() for loss in result.losses or ()]


@pytest.mark.parametrize("transport", ["nccl", "c10d", "copy_engine"])
def test_the_first_step_ends(transport: TransportChoice) -> None:
    """cuBLAS, when first used, waits for all receives that were posted ahead, so ``connect`` uses it before.

    So does a kernel that is loaded at its first launch: ``import ldt`` has all loaded at once.
    """
    with RankPool(2) as pool:
        losses, nothing = pool.run(first_step, transport, timeout=60)
    assert len(losses) == 8
    assert nothing == []


@pytest.mark.parametrize(
    ("first", "second", "warns"), [("ldt", "torch", False), ("torch", "ldt", True)], ids=["before", "after"]
)
def test_an_import_after_cuda_has_started_is_reported(first: str, second: str, warns: bool) -> None:
    """Once CUDA has started, the variable that importing ldt sets has no effect, so ldt queries the driver."""
    imports = {"ldt": "import ldt", "torch": "import torch; torch.zeros(1, device='cuda')"}
    code = f"""
import logging
{imports[first]}
{imports[second]}
logging.basicConfig()
ldt.connect(ldt.Topology([1]), "nccl", device="cuda:0").close()
"""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_MODULE_LOADING"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("CUDA_MODULE_LOADING was not EAGER when CUDA started" in done.stderr) == warns
