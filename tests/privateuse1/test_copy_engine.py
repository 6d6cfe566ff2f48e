"""Lanes by the copy engine on the test device: processes write into each other's memory, and all streams are late.

A flag that is not waited for, memory that is written to too early, or a slot that is filled twice shows as wrong data.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from datetime import timedelta
from pathlib import Path

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all

import ldt
from ldt.runtime.endpoints import Endpoint
from ldt.runtime.strands import AllOf
from ldt.testing import RankPool
from ldt.testing.fused_pair import LEADER, SENDER, FusedPair
from ldt.topology import Topology

WORLD_SIZE = 3
KIB = 1024


def forward_end(mesh: ldt.Mesh) -> Endpoint | None:
    """This rank's end of the hop from stage 0 to stage 1."""
    return mesh.endpoints.get(mesh.topology.channel(0, "F", 0))


def send(end: Endpoint, tensor: torch.Tensor, label: str = "data") -> AllOf:
    work = end.send([tensor], label)
    assert work is not None
    return work


def sized(device: torch.device, nbytes: int, value: int) -> torch.Tensor:
    """Data that no other message has at any place."""
    return (torch.arange(nbytes // 4, dtype=torch.int32, device=device) + 7919 * value)[: nbytes // 4]


def _messages(seed: int, rounds: int, tp: list[int]) -> int:
    """Of random sizes into memory of the lane and of others, with hosts that hurry and hosts that dawdle."""
    alike, own = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
    topology = Topology(tp)
    if dist.get_rank() >= topology.world_size:
        return 0
    with npu.late(seed, 300) as device, torch.Stream(device):
        options = {"transport": "copy_engine", "ranks": range(topology.world_size)}
        with ldt.connect(topology, "hccl", **options) as mesh:
            end = forward_end(mesh)
            checks, waiting = [], []
            for number in range(rounds):
                sizes = [
                    alike.choice([4, 4 * KIB, 36 * KIB, 9 * KIB * KIB])
                    for _ in range(alike.choice([1, 1, 3]))
                ]
                foreign = [alike.random() < 0.3 for _ in sizes]
                ahead = alike.choice([0, 0, 1, 4])
                if own.random() < 0.3:
                    time.sleep(own.random() * 0.004)
                sources = [sized(device, size, number) for size in sizes]
                if end is None:
                    continue
                if end.sends:
                    work = end.send(sources, "data")
                    assert work is not None
                    work.wait()
                    for source in sources:
                        source.fill_(-1)  # at once, behind the wait
                    continue
                targets = [
                    torch.zeros_like(source) if other else end.lane.empty(source.shape, source.dtype)
                    for source, other in zip(sources, foreign, strict=True)
                ]
                waiting.append((end.receive(targets, "data"), targets, sources))
                while len(waiting) > ahead:
                    work, targets, expected = waiting.pop(0)
                    work.wait()
                    checks += [(got == wanted).all() for got, wanted in zip(targets, expected, strict=True)]
                    del targets  # its memory is free for what comes next, while its last use is still queued
            for work, targets, expected in waiting:
                work.wait()
                checks += [(got == wanted).all() for got, wanted in zip(targets, expected, strict=True)]
            if checks:
                assert_all(checks)
            return int(end.lane.stats()["bounced"]) if end is not None and not end.sends else 0


@pytest.mark.parametrize("tp", [[1, 1], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_data_are_right_whoever_comes_first(pool: RankPool, tp: list[int], seed: int) -> None:
    pool.run(_messages, seed, 60, tp, timeout=60)


def _more_than_the_ledger_has() -> None:
    with npu.late(3, 0) as device, ldt.connect(Topology([1, 1, 1]), "hccl") as mesh:
        end, checks = forward_end(mesh), []
        if end is None:
            return
        for first in range(0, 2400, 600):  # a sender that is far ahead, then a receiver
            numbers = range(first, first + 600)
            if end.sends:
                for number in numbers:
                    end.send([torch.full((8,), number, device=device)], "data")
                continue
            targets = [end.lane.empty((8,), torch.int64) for _ in numbers]
            for work in [end.receive([target], "data") for target in targets]:
                work.wait()
            checks += [(target == number).all() for number, target in zip(numbers, targets, strict=True)]
        if checks:
            assert_all(checks)


def test_the_ledger_goes_around(pool: RankPool) -> None:
    pool.run(_more_than_the_ledger_has, timeout=60)


def _refused(transport: str) -> str:
    compiled = npu.start()
    torch.accelerator.set_device_index(dist.get_rank())
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ldt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if dist.get_rank() == 1:
        compiled.refuse_peers("it is a paperweight")
    try:
        with ldt.connect(Topology([1, 1, 1]), "hccl", transport=transport) as mesh:
            transports = sorted({mesh.transport_of(channel) for channel in mesh.endpoints})
            return f"{transports} {[text for text in records if 'paperweight' in text]}"
    except ldt.LdtError as error:
        return str(error)
    finally:
        compiled.refuse_peers("")
        logger.removeHandler(handler)


def test_what_cannot_go_by_the_copy_engine_goes_through_the_groups(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(_refused, "auto", timeout=60)):
        # Between ranks 0 and 2, which have one, they go by it.
        assert text.startswith("['c10d']" if rank == 1 else "['c10d', 'copy_engine']")
        assert text.count("it is a paperweight") == 1


def test_who_insists_on_the_copy_engine_is_told_why_there_is_none(pool: RankPool) -> None:
    for text in pool.run(_refused, "copy_engine", timeout=60):
        assert "take 'auto'" in text
        assert "paperweight" in text


def _written_in_place(waits: bool) -> None:
    """By who has waited for it, or by the next message into the same tensor, while the stage still reads it."""
    with npu.late(5, 300) as device, ldt.connect(Topology([1, 2]), "hccl", transport="copy_engine") as mesh:
        end, checks = forward_end(mesh), []
        assert end is not None
        for number in range(0, 8, 2):
            if end.sends:
                for each in (number, number + 1):
                    end.send([torch.full((4096,), each, device=device)], "data")
                continue
            if dist.get_rank() == 2:
                time.sleep(0.05)  # so that the leader's memory is read, instead of this rank's written to
            target = end.lane.empty((4096,), torch.int64)
            first = end.receive([target], "data")
            if waits or dist.get_rank() == 2:
                first.wait()
                checks.append((target == number).all())
                target.fill_(-1)
            end.receive([target], "data").wait()
            checks.append((target == number + 1).all())
        if checks:
            assert_all(checks)


@pytest.mark.parametrize("waits", [True, False])
def test_what_came_may_be_written_to_once_it_was_waited_for(pool: RankPool, waits: bool) -> None:
    pool.run(_written_in_place, waits, timeout=60)


def _dropped() -> None:
    """The leader lets go of each message without a look, so its block is free for the next one."""
    with npu.late(5, 300) as device, ldt.connect(Topology([1, 2]), "hccl", transport="copy_engine") as mesh:
        end, checks = forward_end(mesh), []
        assert end is not None
        for number in range(8):
            if end.sends:
                end.send([torch.full((4096,), number, device=device)], "data")
                continue
            if dist.get_rank() == 2:
                time.sleep(0.05)
            target = end.lane.empty((4096,), torch.int64)
            work = end.receive([target], "data")
            if dist.get_rank() == 2:
                work.wait()
                checks.append((target == number).all())
            del target
        if checks:
            assert_all(checks)


def test_a_block_is_not_reused_while_the_stage_reads_it(pool: RankPool) -> None:
    pool.run(_dropped, timeout=60)


def _lent_again() -> None:
    """A block that is far too large for the next message goes back, and is lent for it while it is still read."""
    with npu.late(5, 0) as device, ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine") as mesh:
        end = forward_end(mesh)
        if end is None:
            return
        if end.sends:
            end.send([torch.ones(1 << 20, dtype=torch.int64, device=device)], "large")
            end.send([torch.full((16,), 99, device=device)], "small")
            return
        large = end.lane.empty((1 << 20,), torch.int64)
        end.receive([large], "large").wait()
        npu.sleep(500)
        total = large.sum()
        del large
        small = end.lane.empty((16,), torch.int64)
        end.receive([small], "small").wait()
        assert_all([total == 1 << 20, (small == 99).all()])


def test_a_block_that_went_back_is_not_written_to_while_it_is_read(pool: RankPool) -> None:
    pool.run(_lent_again, timeout=60)


def _far_ahead() -> str:
    npu.start()
    torch.accelerator.set_device_index(dist.get_rank())
    mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transfer_timeout=timedelta(seconds=2))
    try:
        end = forward_end(mesh)
        if end is not None and end.sends:
            for number in range(1100):
                end.send([torch.ones(4, device="npu")], f"message {number}")
    except (ldt.LdtError, ldt.LaneError) as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_who_is_a_whole_ledger_ahead_waits_no_longer_than_the_timeout(pool: RankPool) -> None:
    assert (
        "message 102" in pool.run(_far_ahead, timeout=30)[0]
    )  # the ledger has 1024, of which connect used a few


def _different_sizes(first: str) -> tuple[str, bool]:
    """What this rank was told, and whether its lane can still be used."""
    with npu.late(5, 0) as device:
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transport="copy_engine")
        end, text, usable = forward_end(mesh), "", True
        if end is not None:
            if end.sends != (first == "sender"):
                time.sleep(0.5)
            for nbytes in (40, 44):
                count = nbytes // 4 if end.sends else 10
                try:
                    if end.sends:
                        end.send([torch.zeros(count, device=device)], "odd")
                    else:
                        end.receive([end.lane.empty((count,), torch.float32)], "odd")
                except ldt.LaneError as error:
                    text = str(error)
            try:
                end.lane.empty((1,), torch.float32)
                if end.sends:
                    end.send([torch.zeros(1, device=device)], "next")
                else:
                    end.receive([end.lane.empty((1,), torch.float32)], "next")
            except ldt.LaneError:
                usable = False
            end.lane.abort("enough")
        dist.barrier()
        torch.accelerator.synchronize()
        mesh.close()
        return text, usable


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_ends_that_differ_are_told_so(pool: RankPool, first: str) -> None:
    (sent, may_send), (received, may_receive), _ = pool.run(_different_sizes, first, timeout=60)
    text, other = (received, sent) if first == "sender" else (sent, received)
    here, there = (40, 44) if first == "sender" else (44, 40)
    assert f"here a tensor of {here} bytes, there one of {there} bytes" in text
    assert "odd" in text
    assert "F0" in text
    assert other == ""
    assert (may_send, may_receive) == (first == "sender", first == "receiver")


def _figures() -> tuple[int, int, int]:
    """Open files, mappings of shared pages, and threads of Python: the device's own streams have threads, too."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:ldt")
    return len(list(Path("/proc/self/fd").iterdir())), maps, threading.active_count()


def _connected_often() -> list[tuple[int, int, int]]:
    found = []
    with npu.late(7, 0) as device:
        for number in range(12):
            with ldt.connect(Topology([1, 2]), "hccl", transport="copy_engine") as mesh:
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
            found.append(_figures())
    return found


def test_nothing_is_left_of_meshes_that_were_closed(pool: RankPool) -> None:
    for found in pool.run(_connected_often, timeout=60):
        for each in zip(*found, strict=True):  # what another rank still had mapped goes a mesh later
            assert max(each[8:]) < max(each[:4]) + 4, found


def _closed_early(transport: str) -> None:
    """What waits for a message, or uses it, is still queued when the mesh and all that is known of it have gone."""
    with npu.late(6, 0) as device:
        mesh = ldt.connect(Topology([1, 2]), "hccl", transport=transport)
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
            dist.barrier()  # so that nobody else has this rank's memory mapped any more
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


@pytest.mark.parametrize("transport", ["copy_engine", "c10d"])
def test_a_mesh_may_be_closed_ahead_of_the_device(pool: RankPool, transport: str) -> None:
    pool.run(_closed_early, transport, timeout=60)


def _closed_stuck() -> None:
    """The device is busy for longer than close() waits: it copies to the other end's memory when all has gone here."""
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


def test_closing_does_not_take_memory_from_the_device(pool: RankPool) -> None:
    pool.run(_closed_stuck, timeout=60)


def _one_end_fails(pooled: bool) -> bool | None:
    """The sender's end is aborted with a message on its way, which the receiver must never take for data."""
    with npu.late(4, 0) as device:
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl")
        end = forward_end(mesh)
        answer = None
        if end is not None and end.sends:
            npu.sleep(300)  # the message is queued behind this
            work = send(end, torch.ones(1024, device=device), "doomed")
            end.lane.abort("stage 0 has failed")
            torch.accelerator.synchronize()
            assert work.is_completed()  # what it held is let go of
            with pytest.raises(ldt.LaneError, match="stage 0 has failed"):
                work.wait()
        elif end is not None:
            target = end.lane.empty((1024,), torch.float32) if pooled else torch.zeros(1024, device=device)
            work = end.receive([target], "doomed")
            time.sleep(1.0)
            answer = work.is_completed()
            end.lane.abort("told of it")
            with pytest.raises(ldt.LaneError, match="told of it"):
                work.wait()
            torch.accelerator.synchronize()
        dist.barrier()
        mesh.close()
        return answer


@pytest.mark.parametrize("pooled", [True, False])
def test_what_a_failed_end_still_sends_is_not_data(pool: RankPool, pooled: bool) -> None:
    assert pool.run(_one_end_fails, pooled, timeout=60)[1] is False


def _receiver_fails() -> bool | None:
    """The receiver's end is aborted before its memory is free, which the sender must not write to then."""
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
            end.lane.abort("told of it")
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
        mesh.failures.wait(10)
        mesh.failures.check()
    except ldt.LdtError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_a_message_that_does_not_come_is_named_on_all_ranks(pool: RankPool) -> None:
    for text in pool.run(_never_sent, timeout=60):
        assert "receive F0 microbatch 3 has been under way for" in text
        assert "longer than the timeout of 1 s" in text


def _pair_of_which_one_is_source_and_member(refuse: bool) -> str:
    compiled = npu.start()
    if dist.get_rank() > LEADER:
        dist.new_group(
            [SENDER, LEADER], backend="hccl"
        )  # every rank of the world takes part in making groups
        dist.new_group([SENDER, LEADER], backend="hccl")
        dist.new_group([SENDER, LEADER], backend="gloo")
        return ""
    with npu.late(6, 300) as device:
        if refuse and dist.get_rank() == LEADER:
            compiled.refuse_peers("it is a paperweight")
        try:
            pair = FusedPair(device, "copy_engine", backend="hccl", announce=False)
        except ldt.LaneError as error:
            return str(error)
        finally:
            compiled.refuse_peers("")
        checks = []
        for number in range(20):
            message = sized(device, 3 << 20, number)
            works, (target,) = pair.launch([message])
            for work in works:
                work.wait()
            checks.append((target == message).all())
        assert_all(checks)
        pair.close()
    return ""


def test_a_source_may_be_a_member_of_the_stage(pool: RankPool) -> None:
    assert pool.run(_pair_of_which_one_is_source_and_member, False, timeout=60) == ["", "", ""]


def test_a_pair_is_refused_on_both_ranks(pool: RankPool) -> None:
    for text in pool.run(_pair_of_which_one_is_source_and_member, True, timeout=60)[:2]:
        assert "rank 1: the copy engine cannot be used: it is a paperweight" in text
