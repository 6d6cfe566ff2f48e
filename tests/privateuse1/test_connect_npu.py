"""The device and process groups of a mesh whose accelerator is not CUDA."""

from __future__ import annotations

import time

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, fused_lane, is_sender, launch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import ldt
from ldt.cli.doctor import _devices
from ldt.testing import RankPool, in_time, paced, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3


def step(mesh: ldt.Mesh, chunks: list[nn.Module]) -> Tensor | None:
    batch = [(x.to(mesh.device), y.to(mesh.device)) for x, y in toy_microbatches(3)]
    mine = [chunks[index].to(mesh.device) for index in mesh.topology.chunks_of(mesh.stage)]
    pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
    return pipeline.step(batch if mesh.is_edge else None).loss


def _default_group() -> str:
    """A world whose only backend is HCCL, with no backend given to connect: the control plane still uses gloo."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    with npu.late(1, 300):
        dist.destroy_process_group()
        dist.init_process_group("hccl", store=store, rank=rank, world_size=world)
        topology = Topology([1] * world)
        with ldt.connect(topology) as mesh:
            loss = step(mesh, toy_chunks(topology))
            assert loss is None or bool(loss.isfinite())
            return str(mesh.device)


def test_hccl_as_the_default_group() -> None:
    with RankPool(2) as pool:  # of its own, whose default group is replaced
        assert pool.run(_default_group) == ["npu:0", "npu:1"]


def _groups_of_one() -> set[str]:
    """Groups of this rank alone use the backend that was given, not that of the default group."""
    with npu.late(2, 300), ldt.connect(Topology([1, 1, 1]), "hccl") as mesh:
        whole = torch.ones(4, 2, device=mesh.device)
        split = DTensor.from_local(whole, mesh.tp_mesh, [Shard(0)])
        assert torch.equal(split.full_tensor(), whole)
        return {dist.get_backend(part.get_group()) for part in (mesh.tp_mesh, mesh.dp_mesh)}


def test_groups_of_one_rank_have_the_backend_of_the_mesh(pool: RankPool) -> None:
    assert pool.run(_groups_of_one) == [{"hccl"}] * WORLD_SIZE


def _busy_device(another_is_current: bool) -> tuple[str, float]:
    """Work queued on the current stream of rank 0 takes longer than the timeout of connect."""
    with npu.late(4) as device:
        if dist.get_rank() == 0:
            npu.sleep(6000.0)
        if another_is_current:
            torch.accelerator.set_device_index((dist.get_rank() + 1) % torch.npu.device_count())
        start = time.monotonic()
        with pytest.raises(ldt.LdtError) as caught:
            ldt.connect(Topology([1, 1, 1]), "hccl", device=device, timeout=paced(1))
        seconds = time.monotonic() - start
        torch.accelerator.current_stream(device).synchronize()
        return str(caught.value), seconds


@pytest.mark.parametrize("another_is_current", [False, True])
def test_a_busy_device_does_not_delay_the_first_connect(another_is_current: bool) -> None:
    with RankPool(WORLD_SIZE) as fresh:  # as libraries are opened once
        answers = fresh.run(_busy_device, another_is_current)
    for rank, (text, seconds) in enumerate(answers):
        assert in_time(seconds, 5.0)
        assert rank > 0 or "npu:0 did not finish a small matmul in time" in text


def _another_current_device() -> None:
    """Lanes use the device that they were created for, whichever is current."""
    with npu.late(3) as device:
        lane = fused_lane(device)
        torch.accelerator.set_device_index((dist.get_rank() + 1) % torch.npu.device_count())
        checks = []
        for round_ in range(20):
            source = torch.full((500,), float(round_), device=device)
            work, (target,) = launch(lane, [source])
            work.wait()
            npu.sleep(0.5, torch.accelerator.current_stream(device))
            checks.append((target == round_).all())
            if is_sender():
                source.fill_(-1)
            del target
        assert_all(checks)
        lane.close()


def test_a_lane_needs_no_current_device(pool: RankPool) -> None:
    pool.run(_another_current_device)


def _autocast() -> None:
    """ldt queries autocast and its dtype for the device type. Hops then carry bfloat16."""
    topology = Topology([1, 1, 1])
    torch.manual_seed(0)
    chunks: list[nn.Module] = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    with npu.late(4, 300), ldt.connect(topology, "hccl") as mesh:
        exact = step(mesh, chunks)
        with torch.autocast("npu", torch.bfloat16):
            loss = step(mesh, chunks)
        if mesh.is_edge:
            assert 0 < (loss - exact).abs().item() < 0.1


def test_a_step_under_autocast(pool: RankPool) -> None:
    pool.run(_autocast)


def _named_by_doctor() -> str:
    npu.start()
    (finding,) = _devices(torch)
    return finding.value


def test_doctor_names_the_devices(pool: RankPool) -> None:
    assert pool.run(_named_by_doctor, ranks=[0]) == ["CPU, NPU 0, NPU 1, NPU 2, NPU 3"]


class Moving(nn.Module):
    """Returns its output on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.device)


def _elsewhere(backend: str, to: str) -> str:
    topology = Topology([1, 1, 1])
    with npu.late(1, 300), ldt.connect(topology, backend) as mesh:
        chunks: list[nn.Module] = [nn.Linear(16, 16), Moving(to), nn.Tanh(), nn.Tanh()]
        with pytest.raises(ldt.LdtError) as caught:
            step(mesh, chunks)
        return str(caught.value)


@pytest.mark.parametrize(("backend", "to"), [("hccl", "cpu"), ("gloo", "npu:0")])
def test_an_output_on_another_device_is_refused(pool: RankPool, backend: str, to: str) -> None:
    for text in pool.run(_elsewhere, backend, to):
        assert f"output of chunk 1 for microbatch 0, tensor 0 is on {to}, but the mesh is on" in text


def _of_another_kind(backend: str | None, device: str) -> str:
    with npu.late(1, 300), pytest.raises(ValueError, match="backend") as caught:
        ldt.connect(Topology([1, 1, 1]), backend, device=device)
    return str(caught.value)


@pytest.mark.parametrize(("backend", "device"), [("gloo", "npu"), ("gloo", "npu:0"), ("hccl", "cpu")])
def test_a_backend_for_another_device_is_refused(pool: RankPool, backend: str, device: str) -> None:
    kind = {"gloo": "cpu", "hccl": "npu"}[backend]
    for text in pool.run(_of_another_kind, backend, device):
        assert (
            f"backend {backend!r} (given to connect) moves tensors of {kind} devices, but device is {device}"
            in text
        )
