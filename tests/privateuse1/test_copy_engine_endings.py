"""Copy engine lanes on the test device that fail, hang or close: freed memory, memory in use, and invalid data."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from pathlib import Path

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import forward_end, send

import ldt
from ldt._C import IpcPool, IpcReceiver
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3


def _figures(device: torch.device) -> tuple[int, int, int]:
    """Open files, mappings of shared pages, and Python threads: the streams of the device have threads as well.

    What another rank still had mapped when this one closed goes when memory is asked for the next time: here.
    """
    IpcReceiver(IpcPool(device))
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:ldt")
    return len(list(Path("/proc/self/fd").iterdir())), maps, threading.active_count()


def _connected_often(transport: str) -> list[tuple[int, int, int]]:
    found = []
    with npu.late(7, 0) as device:
        for number in range(12):
            options = {"connections": 1} if transport == "host" else {}
            with ldt.connect(Topology([1, 2]), "hccl", transport=transport, **options) as mesh:
                end = forward_end(mesh)
                assert end is not None
                if end.sends:
                    send(end, torch.full((4096,), number, device=device)).wait()
                else:
                    target = end.lane.empty((4096,), torch.int64)
                    end.receive([target], "data").wait()
                    assert (target == number).all().item()
                    del target
                del end
            del mesh
            torch.accelerator.synchronize()
            dist.barrier()
            found.append(_figures(device))
    return found


@pytest.mark.parametrize("transport", ["copy_engine", "host"])
def test_closed_meshes_leave_nothing(pool: RankPool, transport: str) -> None:
    for found in pool.run(_connected_often, transport, timeout=60):
        for each in zip(*found, strict=True):
            assert max(each[8:]) < max(each[:4]) + 4, found


def _closed_early(transport: str) -> None:
    """Work that waits for a message, or uses it, is still queued when the mesh and its objects are gone."""
    of_device, options = npu.TRANSPORTS[transport]
    with npu.late(6, 0, **of_device) as device:
        mesh = ldt.connect(Topology([1, 2]), "hccl", **options)
        end, total = forward_end(mesh), None
        assert end is not None
        if end.sends:
            send(end, torch.ones(4096, device=device)).wait()
            torch.accelerator.synchronize()
            work = None
        else:
            npu.sleep(1500)
            target = end.lane.empty((4096,), torch.float32)
            work = end.receive([target], "data")
            work.wait()
            total = target.sum()
            del target
        if not end.sends:
            dist.barrier()  # so that no peer has the memory of this rank mapped
        sends = end.sends
        del work, end
        mesh.close()
        del mesh
        gc.collect()
        if sends:
            dist.barrier()
        torch.accelerator.synchronize()
        assert total is None or total.item() == 4096
        dist.barrier()


@pytest.mark.parametrize("transport", npu.TRANSPORTS)
def test_a_mesh_may_be_closed_ahead_of_the_device(pool: RankPool, transport: str) -> None:
    pool.run(_closed_early, transport, timeout=60)


def _closed_stuck() -> None:
    """The device is busy for longer than close() waits: it copies to the memory of the peer after the mesh is gone."""
    with npu.late(6, 0) as device:
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine")
        end = forward_end(mesh)
        if end is not None and end.sends:
            source = torch.ones(4096, device=device)
            npu.sleep(3500)
            end.send([source], "data")
            end.lane.close(0)
        del end
        mesh.close()
        del mesh
        gc.collect()
        torch.accelerator.synchronize()
        dist.barrier()


def test_closing_does_not_free_memory_in_use(pool: RankPool) -> None:
    pool.run(_closed_stuck, timeout=60)


def _one_end_fails(pooled: bool) -> bool | None:
    """The sender aborts with a message in flight, which the receiver must never take for data."""
    with npu.late(4, 0) as device:
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl")
        end = forward_end(mesh)
        answer = None
        if end is not None and end.sends:
            npu.sleep(300)  # the message is queued behind this
            work = send(end, torch.ones(1024, device=device), "doomed")
            end.lane.abort("stage 0 has failed")
            torch.accelerator.synchronize()
            assert work.is_completed()  # it has dropped its tensors
            with pytest.raises(ldt.LaneError, match="stage 0 has failed"):
                work.wait()
        elif end is not None:
            target = end.lane.empty((1024,), torch.float32) if pooled else torch.zeros(1024, device=device)
            work = end.receive([target], "doomed")
            time.sleep(1.0)
            answer = work.is_completed()
            end.lane.abort("the test aborts it")
            with pytest.raises(ldt.LaneError, match="the test aborts it"):
                work.wait()
            torch.accelerator.synchronize()
        dist.barrier()
        mesh.close()
        return answer


@pytest.mark.parametrize("pooled", [True, False])
def test_data_from_a_failed_sender_are_rejected(pool: RankPool, pooled: bool) -> None:
    assert pool.run(_one_end_fails, pooled, timeout=60)[1] is False


def _receiver_fails() -> bool | None:
    """The receiver aborts before its memory is free; the sender must not write to it."""
    with npu.late(4, 0) as device:
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl")
        end = forward_end(mesh)
        answer = None
        if end is not None and not end.sends:
            target = end.lane.empty((1024,), torch.float32)
            npu.sleep(300)
            del target  # its last use is queued behind this
            end.receive([end.lane.empty((1024,), torch.float32)], "doomed")
            end.lane.abort("stage 1 has failed")
        dist.barrier()
        if end is not None and end.sends:
            work = send(end, torch.ones(1024, device=device), "doomed")
            time.sleep(1.0)
            answer = work.is_completed()
            end.lane.abort("the test aborts it")
        torch.accelerator.synchronize()
        dist.barrier()
        mesh.close()
        return answer


def test_nothing_is_sent_to_an_end_that_failed(pool: RankPool) -> None:
    assert pool.run(_receiver_fails, timeout=60)[0] is False


def _never_sent() -> str:
    npu.start()
    torch.accelerator.set_device_index(dist.get_rank())
    mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transfer_timeout=timedelta(seconds=1))
    try:
        end = forward_end(mesh)
        if end is not None and not end.sends:
            end.receive([end.lane.empty((4,), torch.float32)], "F0 microbatch 3")
        mesh.watchdog.wait(60.0)
        mesh.watchdog.check()
    except ldt.LdtError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_a_missing_message_is_named_on_all_ranks(pool: RankPool) -> None:
    for text in pool.run(_never_sent, timeout=60):
        assert "receive F0 microbatch 3 has been under way for" in text
        assert "longer than the timeout of 1 s" in text
