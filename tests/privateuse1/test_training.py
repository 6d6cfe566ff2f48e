"""Training on the test device: clipping, loss scaling, metadata, and failures."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import npu
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ldt
from ldt.testing import RankPool, in_time, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
WIDTH, WORDS = 16, 11


def mine(chunks: list[nn.Module], mesh: ldt.Mesh) -> list[nn.Module]:
    return [chunks[index] for index in mesh.topology.chunks_of(mesh.stage)]


def _clipped_and_scaled() -> list[float]:
    with npu.late(1, 300) as device, torch.Stream(device):
        chunks = [chunk.to(device) for chunk in toy_chunks(TOPOLOGY, WIDTH)]
        batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(3, WIDTH)]
        model = copy.deepcopy(nn.Sequential(*chunks))
        reference = torch.optim.AdamW(model.parameters(), lr=0.01)
        with ldt.connect(TOPOLOGY, "hccl") as mesh:
            scaler = ldt.GradScaler(mesh, init_scale=256.0)
            pipeline = ldt.Pipeline(
                mine(chunks, mesh), mesh, loss_fn=toy_loss if mesh.is_edge else None, grad_scaler=scaler
            )
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
            norms = []
            for _ in range(3):
                reference.zero_grad()
                for x, y in batch:
                    (toy_loss(model(x), y) / len(batch)).backward()
                expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                reference.step()
                optimizer.zero_grad()
                pipeline.step(batch if mesh.is_edge else None)
                scaler.unscale_(optimizer)
                norm = ldt.clip_grad_norm_(pipeline.parameters(), 0.5, mesh)
                torch.testing.assert_close(norm.cpu(), expected.cpu())
                scaler.step(optimizer)
                scaler.update()
                norms.append(float(norm))
            for index in TOPOLOGY.chunks_of(mesh.stage):
                for got, wanted in zip(chunks[index].parameters(), model[index].parameters(), strict=True):
                    torch.testing.assert_close(got.cpu(), wanted.cpu())
    return norms


def test_clipping_and_loss_scaling(pool: RankPool) -> None:
    edge, *cloud = pool.run(_clipped_and_scaled, timeout=60)
    assert all(norms == edge for norms in cloud)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if type(x) is Tensor:  # not while shapes are inferred
            self.seen.append(attention_mask.clone())
        places = 0 if position_ids is None else position_ids[..., None].float() / 100
        return torch.tanh(self.linear((x * attention_mask[..., None]).cumsum(1) + places))


class Head(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.embedding(input_ids), attention_mask, position_ids)


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target >= 0
    return ((output.mean(-1) - target).square() * kept).sum(), kept.sum()


def masked_batch(device: torch.device, seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    batch = []
    for words in (5, 7):
        mask = torch.ones(2, words, dtype=torch.int64)
        mask[1, words - seed - 1 :] = 0
        inputs = {
            "input_ids": torch.randint(WORDS, (2, words), generator=draw),
            "attention_mask": mask,
            "position_ids": torch.arange(words).expand(2, -1).contiguous(),
        }
        target = torch.where(mask > 0, torch.randn(2, words, generator=draw), -1)
        batch.append(({name: value.to(device) for name, value in inputs.items()}, target.to(device)))
    return batch


def _masked(audit: str) -> int:
    with npu.late(2, 300) as device, torch.Stream(device):
        torch.manual_seed(0)
        chunks: list[nn.Module] = [Head(), Masked(), Masked(), Masked()]
        chunks = [chunk.to(device) for chunk in chunks]
        batches = [masked_batch(device, seed) for seed in (1, 2)]
        with ldt.connect(TOPOLOGY, "hccl") as mesh:
            pipeline = ldt.Pipeline(
                mine(chunks, mesh),
                mesh,
                loss_fn=token_loss if mesh.is_edge else None,
                loss_reduction="token",
                audit=audit if mesh.is_edge else None,
            )
            edge = mesh.is_edge
            pipeline.validate(batches[0] if edge else None)
            first = pipeline.step(batches[0] if edge else None, upcoming=batches[1] if edge else None)
            second = pipeline.step(batches[1] if edge else None)
            for chunk in mine(chunks, mesh):
                assert isinstance(chunk, Masked)
                seen = [inputs["attention_mask"] for batch in batches for inputs, _ in batch]
                assert len(chunk.seen) == len(seen)
                assert all(map(torch.equal, chunk.seen, seen))
            if edge:
                assert first.loss is not None
                assert second.loss is not None
                assert not torch.equal(first.loss, second.loss)
                assert bool(first.loss.isfinite())
            return mesh.stage


def test_metadata_tokens_and_audit(pool: RankPool, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    assert pool.run(_masked, str(audit), timeout=60) == [0, 1, 2]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert any("F" in str(line.get("channel")) for line in lines)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise ArithmeticError("a chunk that fails")
        return self.linear(x)  # type: ignore[no-any-return]


def _two_steps(pipeline: ldt.Pipeline, batch: Any) -> None:
    """On a device with streams only waits of the host notice a failure: perhaps not before the second step."""
    for _ in range(2):
        pipeline.step(batch if pipeline.mesh.is_edge else None)


def _failing_step(device: torch.device, backend: str) -> tuple[str, float]:
    chunks: list[Any] = [chunk.to(device) for chunk in toy_chunks(TOPOLOGY, WIDTH)]
    chunks[2] = Failing().to(device)
    batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(4, WIDTH)]
    mesh = ldt.connect(TOPOLOGY, backend, device=device)
    pipeline = ldt.Pipeline(mine(chunks, mesh), mesh, loss_fn=toy_loss if mesh.is_edge else None)
    start = time.monotonic()
    with pytest.raises((ArithmeticError, ldt.LdtError)) as error:
        _two_steps(pipeline, batch)
    mesh.close()
    return str(error.value), time.monotonic() - start


def _failing() -> tuple[str, float]:
    with npu.late(3, 300) as device:
        answer = _failing_step(device, "hccl")
        torch.accelerator.synchronize()  # nothing on the device waits for messages that never come
        return answer


def test_a_failure_ends_the_step_on_all_ranks_and_frees_their_streams(pool: RankPool) -> None:
    for text, seconds in pool.run(_failing):
        assert "a chunk that fails" in text
        assert in_time(seconds, 15)


def _failing_without_abort() -> tuple[str, float]:
    npu.start()
    return _failing_step(torch.device("npu", dist.get_rank()), npu.WITHOUT_ABORT)


def test_a_failure_is_reported_and_the_mesh_closes_even_if_the_device_is_stuck() -> None:
    with RankPool(WORLD_SIZE) as pool:  # its own pool: its streams stay stuck
        for text, seconds in pool.run(_failing_without_abort):
            assert "a chunk that fails" in text
            assert in_time(seconds, 25)
