"""Tests that errors give advice: outputs without plain memory, and transports without a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pipeline_jobs import build
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 2
TOPOLOGY = Topology([1, 1])

MAKE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "coo": (lambda x: x.to_sparse(), "call to_dense(), or give the layer that makes it sparse=False,"),
    "csr": (lambda x: x.to_sparse_csr(), "call to_dense()"),
    "mkldnn": (lambda x: x.detach().to_mkldnn(), "call to_dense()"),
    "quantized": (lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), "call dequantize()"),
    "nested": (lambda x: torch.nested.nested_tensor([x.detach()]), "call to_padded_tensor()"),
    "meta": (lambda x: x.detach().to("meta"), "to_empty(device=mesh.device)"),
}


class Returning(nn.Linear):
    """Returns an output of the given ``kind``."""

    kind = ""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return MAKE[self.kind][0](y) if self.kind else y


def returning(chunk: int, kind: str, declared: bool) -> str:
    chunks: list[nn.Module] = toy_chunks(TOPOLOGY)
    chunks[chunk] = Returning()
    chunks[chunk].kind = kind  # type: ignore[assignment]
    if declared:
        chunks[chunk].output_spec = lambda x: x  # type: ignore[assignment]
    with ldt.connect(TOPOLOGY) as mesh:
        pipeline = build(mesh, chunks)
        with pytest.raises(ldt.LdtError) as caught:
            pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        return str(caught.value)


@pytest.mark.parametrize("kind", MAKE)
def test_an_output_without_plain_memory_names_its_chunk_and_gives_advice(pool: RankPool, kind: str) -> None:
    for text in pool.run(returning, 0, kind, True):
        assert "output of chunk 0 for microbatch 0, tensor 0 is a tensor (" in text
        assert MAKE[kind][1] in text


@pytest.mark.parametrize("chunk", [0, 1])
def test_shape_inference_refuses_a_sparse_output(pool: RankPool, chunk: int) -> None:
    for text in pool.run(returning, chunk, "coo", False):
        assert f"cannot tell what chunk {chunk} (Returning) returns" in text
        assert "give the layer that makes it sparse=False" in text


def test_a_gpu_transport_names_the_missing_backend(pool: RankPool) -> None:
    for text in pool.run(refused):
        assert "the process group has no backend for cuda (it has cpu:gloo" in text
        assert "init_process_group('cpu:gloo,cuda:nccl')" in text


def refused() -> str:
    with pytest.raises(ValueError, match="transport") as caught:
        ldt.connect(TOPOLOGY, transport="copy_engine")
    return str(caught.value)
