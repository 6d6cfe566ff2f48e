"""A device whose every call fails, as CUDA after a device-side assertion: all lanes end anyway."""

from __future__ import annotations

import gc
from typing import Any

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import forward_end, fused_lane, is_sender, send
from torch import Tensor, nn

import ldt
from ldt._C import abort_all
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

WORLD_SIZE = 3
TEXT = "device-side assert triggered"


def _ended(how: str) -> str:
    """Rank 1 waits on its device for a message that never comes, fails, and closes its lanes."""
    with npu.late(1, 0) as device:
        compiled = npu.start()
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine")
        end, said = forward_end(mesh), ""
        if end is not None and not end.sends:
            # Not memory of the lane: an event, which is queried, marks its arrival.
            target = torch.zeros(1024, device=device)
            work = end.receive([target], "never sent")
            work.wait()
            compiled.fail_device(TEXT)
            {
                "abort": lambda: end.lane.abort("enough"),
                "close": lambda: end.lane.close(0),
                "exit": lambda: abort_all("enough"),
            }[how]()
            del work, target
            gc.collect()
            try:
                end.lane.send([torch.ones(1)], 0)
            except ldt.LaneError as error:
                said = str(error)
            compiled.fail_device("")
            torch.accelerator.synchronize()  # nothing on the device still waits
        dist.barrier()
        mesh.close()
        return said


@pytest.mark.parametrize("how", ["abort", "close", "exit"])
def test_a_lane_ends_its_messages_in_flight(pool: RankPool, how: str) -> None:
    text = pool.run(_ended, how, timeout=60)[1]
    assert ("closed with messages still in flight" if how == "close" else "enough") in text


def _all_lanes_end() -> list[bool]:
    """Lanes over groups: aborting the first must not block aborting the others."""
    with npu.late(2, 0) as device:
        compiled = npu.start()
        lanes = [fused_lane(device) for _ in range(3)]
        if not is_sender():
            works = [lane.recv([torch.zeros(1 << 10, device=device)], 0) for lane in lanes]
            compiled.fail_device(TEXT)
            abort_all("enough")
            compiled.fail_device("")
            torch.accelerator.synchronize()
            return [work.is_completed() for work in works]
        return []


def test_all_lanes_end_when_the_process_does(pool: RankPool) -> None:
    assert pool.run(_all_lanes_end, timeout=60)[1:] == [[True] * 3] * 2


def _memory_goes() -> None:
    """Tensors of a lane are freed while the device returns errors, some with work in flight: no destructor throws."""
    with npu.late(3, 0) as device:
        compiled = npu.start()
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine")
        end = forward_end(mesh)
        for nbytes in (64, 1 << 12, 1 << 16):
            if end is None:
                break
            if end.sends:
                send(end, torch.ones(nbytes, device=device))
                continue
            target, spare = (end.lane.empty([nbytes], torch.float32) for _ in range(2))
            end.receive([target], "data").wait()
            npu.sleep(20)
            used = target.sum()
            del spare
            compiled.fail_device(TEXT)
            del target
            compiled.fail_device("")
            assert used.item() == nbytes
        compiled.fail_device(TEXT)
        del end
        mesh.endpoints.clear()
        gc.collect()
        compiled.fail_device("")
        torch.accelerator.synchronize()
        dist.barrier()
        mesh.close()


def test_objects_freed_meanwhile_do_not_end_the_process(pool: RankPool) -> None:
    pool.run(_memory_goes, timeout=60)


class Asserting(nn.Module):
    """Its second forward breaks the device."""

    def __init__(self, compiled: Any, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.compiled, self.calls = compiled, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.calls += 1
            if self.calls == 2:
                self.compiled.fail_device(TEXT)
        return self.linear(x)  # type: ignore[no-any-return]


def _step(transport: str) -> tuple[str, str, bool]:
    with npu.late(4, 300) as device:
        compiled, topology = npu.start(), Topology([1, 1, 1])
        chunks: list[nn.Module] = [chunk.to(device) for chunk in toy_chunks(topology, 16)]
        chunks[1] = Asserting(compiled, 16).to(device)
        batch = [(x.to(device), y.to(device)) for x, y in toy_microbatches(6, 16)]
        mesh = ldt.connect(topology, "hccl", transport=transport)
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        lanes, said = mesh.all_lanes(), ("", "")
        try:
            for _ in range(2):
                pipeline.step(batch if mesh.is_edge else None)
        except Exception as error:
            said = type(error).__name__, str(error)
        mesh.close()
        ended = 0
        for lane in lanes:
            with pytest.raises(ldt.LaneError):
                lane.recv([torch.ones(1, device="cpu")], 0)
            ended += 1
        compiled.fail_device("")
        torch.accelerator.synchronize()
        dist.barrier()
        return (*said, ended == len(lanes) > 0)


@pytest.mark.parametrize("transport", ["c10d", "copy_engine", "host"])
def test_a_step_ends_on_all_ranks(pool: RankPool, transport: str) -> None:
    for rank, (kind, text, ended) in enumerate(pool.run(_step, transport, timeout=60)):
        assert kind == ("RuntimeError" if rank == 1 else "RemoteStageError"), text
        assert TEXT in text
        assert ended
