"""Messages that the copy engine cannot carry, and endpoints that do not match: fallbacks and error texts."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end, sized

import ldt
from ldt.testing import RankPool
from ldt.testing.fused_pair import LEADER, SENDER, FusedPair
from ldt.topology import Topology

WORLD_SIZE = 3


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
        compiled.refuse_copy_engine("it is a paperweight")
    try:
        with ldt.connect(Topology([1, 1, 1]), "hccl", transport=transport) as mesh:
            transports = sorted({mesh.transport_of(channel) for channel in mesh.endpoints})
            return f"{transports} {[text for text in records if 'paperweight' in text]}"
    except ldt.LdtError as error:
        return str(error)
    finally:
        compiled.refuse_copy_engine("")
        logger.removeHandler(handler)


def test_messages_that_the_copy_engine_cannot_carry_use_the_groups(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(_refused, "auto", timeout=60)):
        # Between ranks 0 and 2, which have one, they go by it.
        assert text.startswith("['c10d']" if rank == 1 else "['c10d', 'copy_engine']")
        assert text.count("it is a paperweight") == 1


def test_a_required_copy_engine_that_is_missing_raises_the_reason(pool: RankPool) -> None:
    for text in pool.run(_refused, "copy_engine", timeout=60):
        assert "use transport='auto'" in text
        assert "paperweight" in text


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


def test_a_full_lane_queue_blocks_no_longer_than_the_timeout(pool: RankPool) -> None:
    """The error comes from the send that waits for room, or from the watchdog for the first message in flight."""
    text = pool.run(_far_ahead, timeout=30)[0]
    assert (
        "more than 896 operations in the queue of the device" in text or "has been under way for 2 s" in text
    )


def _different_sizes(first: str) -> tuple[str, bool]:
    """The error on this rank, and whether its lane is still usable."""
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
def test_endpoints_that_differ_raise(pool: RankPool, first: str) -> None:
    (sent, may_send), (received, may_receive), _ = pool.run(_different_sizes, first, timeout=60)
    text, other = (received, sent) if first == "sender" else (sent, received)
    here, there = (40, 44) if first == "sender" else (44, 40)
    assert f"here a tensor of {here} bytes, there one of {there} bytes" in text
    assert "odd" in text
    assert "F0" in text
    assert other == ""
    assert (may_send, may_receive) == (first == "sender", first == "receiver")


def _pair_of_which_one_is_source_and_member(refuse: bool) -> str:
    compiled = npu.start()
    if dist.get_rank() > LEADER:
        dist.new_group(
            [SENDER, LEADER], backend="hccl"
        )  # every rank of the world takes part in creating groups
        dist.new_group([SENDER, LEADER], backend="hccl")
        dist.new_group([SENDER, LEADER], backend="gloo")
        return ""
    with npu.late(6, 300) as device:
        if refuse and dist.get_rank() == LEADER:
            compiled.refuse_copy_engine("it is a paperweight")
        try:
            pair = FusedPair(device, "copy_engine", backend="hccl", chunk_bytes=1 << 20)  # three pieces
        except ldt.LaneError as error:
            return str(error)
        finally:
            compiled.refuse_copy_engine("")
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
