"""The fused receive and broadcast between processes: data, waits, lifetimes, checks."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lane_world import (
    LEADER,
    MEMBER,
    SENDER,
    error_of,
    fused_lane,
    launch,
    pair_lane,
    random_message,
    random_targets,
    same_bits,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from ldt._C import Lane
from ldt.testing import RankPool

WORLD_SIZE = 3


def _random_messages(chunk_bytes: int, in_inference_mode: bool) -> None:
    lane = fused_lane(chunk_bytes=chunk_bytes)
    messages = [random_message(seed) for seed in range(30)]
    with torch.inference_mode(in_inference_mode):
        launched = [launch(lane, message) for message in messages]
        given = [random_targets(message, seed) for seed, message in enumerate(messages)]
        launched += [
            launch(lane, message, "", targets) for message, targets in zip(messages, given, strict=True)
        ]
    for message, (work, arrived) in zip(messages * 2, launched, strict=True):
        work.wait()
        assert all(map(same_bits, arrived, message)), message
    lane.close()


@pytest.mark.parametrize(("chunk_bytes", "inference"), [(64, False), (100, False), (1 << 20, True)])
def test_any_tensors_arrive_bit_exact_and_in_order(pool: RankPool, chunk_bytes: int, inference: bool) -> None:
    pool.run(_random_messages, chunk_bytes, inference)


def _into_any_layout() -> None:
    lane = fused_lane()
    source = torch.arange(96.0).view(2, 3, 4, 4)
    targets = [
        torch.zeros(4, 4, 3, 2).permute(3, 2, 0, 1),
        torch.zeros(2, 3, 4, 8)[..., ::2],
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    sends = dist.get_rank() == SENDER
    work = lane.send([source] * 3, LEADER) if sends else lane.recv(targets, SENDER)
    work.wait()
    assert sends or all(torch.equal(target, source) for target in targets)
    lane.close()


def test_targets_may_be_non_contiguous(pool: RankPool) -> None:
    pool.run(_into_any_layout)


def test_the_random_messages_have_views_of_all_kinds() -> None:
    sent = [tensor for seed in range(30) for tensor in random_message(seed)]
    given = [tensor for seed in range(30) for tensor in random_targets(random_message(seed), seed)]
    for tensors in (sent, given):
        filled = [tensor for tensor in tensors if tensor.numel()]
        for contiguous in (True, False):
            alike = [tensor for tensor in filled if tensor.is_contiguous() == contiguous]
            assert any(tensor.is_conj() for tensor in alike)
            assert any(tensor.is_neg() for tensor in alike)


def test_same_bits_compares_values() -> None:
    one = torch.arange(4.0)[1::2][:1]  # a single element with a stride of 2
    assert same_bits(one, torch.ones(1))
    assert not same_bits(one, torch.zeros(1))
    z = torch.tensor([1 + 2j])
    assert same_bits(z.conj(), z.conj().resolve_conj())
    assert not same_bits(z.conj(), z)
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


def _with_the_last_rank_as_leader() -> None:
    leader, member = 2, 1  # so the leader is rank 1 of its stage group
    p2p, stage = dist.new_group([SENDER, leader]), dist.new_group([member, leader])
    rank = dist.get_rank()
    lane = Lane(
        "last",
        p2p=None if rank == member else p2p,
        stage=None if rank == SENDER else stage,
        stage_root=1,
        chunk_bytes=64,
    )
    source = torch.arange(100.0)
    target = torch.zeros(100)
    work = lane.send([source], 1) if rank == SENDER else lane.recv([target], 0)
    work.wait()
    assert rank == SENDER or torch.equal(target, source)
    if rank == leader:
        text = error_of(lambda: lane.recv([target.to_sparse()], 0))
        assert "lane last: receive from rank 0 of" in text
        text = error_of(lambda: Lane("x", p2p=p2p, stage=stage, stage_root=0))
        assert "give that to the root only" in text
    if rank == SENDER:
        assert "lane last: send to rank 2 of" in error_of(lambda: lane.send([source.to_sparse()], 1))
    lane.close()


def test_a_leader_need_not_be_the_first_of_its_stage_group(pool: RankPool) -> None:
    pool.run(_with_the_last_rank_as_leader)


def _wait_again_and_from_threads() -> dict[str, float]:
    lane = fused_lane()
    time.sleep(0.3 if dist.get_rank() == SENDER else 0.0)
    work, arrived = launch(lane, [torch.full((5000,), 7.0)])
    waited: list[bool] = []
    threads = [threading.Thread(target=lambda: waited.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited == [True] * 4
    assert work.wait()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    work.get_future().wait()
    assert torch.equal(arrived[0], torch.full((5000,), 7.0))
    stats = lane.stats()
    lane.close()
    return stats


def test_waiting_again_or_from_threads_issues_nothing(pool: RankPool) -> None:
    sender, leader, member = pool.run(_wait_again_and_from_threads)
    assert (sender["sent_messages"], sender["sent_bytes"]) == (1, 20000)
    assert (leader["received_messages"], leader["received_bytes"], leader["broadcast_bytes"]) == (
        1,
        20000,
        20000,
    )
    assert (member["received_bytes"], member["broadcast_bytes"]) == (0, 20000)
    assert leader["wait_seconds"] > 0.1


def _both_ways_large() -> None:
    up, down = pair_lane(), pair_lane()
    if up is None or down is None:
        return
    rank = dist.get_rank()
    outgoing, incoming = (up, down) if rank == SENDER else (down, up)
    works, arrived = [], []
    for microbatch in range(4):
        works.append(outgoing.send([torch.full((4 << 20,), float(rank * 10 + microbatch))], 1 - rank))
        arrived.append(incoming.empty([4 << 20], torch.float32))
        works.append(incoming.recv([arrived[-1]], 1 - rank))
    for work in works:
        work.wait()
    for microbatch, tensor in enumerate(arrived):
        assert (tensor == (1 - rank) * 10 + microbatch).all()
    up.close()
    down.close()


def test_16_mib_both_ways_do_not_block_one_another(pool: RankPool) -> None:
    pool.run(_both_ways_large)


def _lifetime_of_a_send() -> None:
    lane = fused_lane()
    if dist.get_rank() != SENDER:
        time.sleep(0.5)
        work, arrived = launch(lane, [torch.zeros(1000)])
        work.wait()
        assert torch.equal(arrived[0], torch.arange(1000.0))
    else:
        tensor = torch.arange(1000.0)
        storage = weakref.ref(tensor.untyped_storage())
        lane.send([tensor], LEADER)  # nothing waits
        del tensor
        assert storage() is not None, "the send must hold what it reads"
        deadline = time.monotonic() + 10
        while storage() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert storage() is None, "the send must release it when it is done"
    lane.close()


def test_a_send_holds_its_tensor_until_it_is_done_and_no_longer(pool: RankPool) -> None:
    pool.run(_lifetime_of_a_send)


def _bad_calls() -> None:
    lane = fused_lane()
    rank = dist.get_rank()
    if rank == MEMBER:
        assert "only leaders send" in error_of(lambda: lane.send([torch.ones(2)], 0))
    else:
        assert "other than" in error_of(lambda: lane.send([torch.ones(2)], rank))
        assert "0 to 1" in error_of(lambda: lane.send([torch.ones(2)], 2))
        assert "0 to 1" in error_of(lambda: lane.recv([torch.ones(2)]))
        assert "expected a tensor on cpu" in error_of(
            lambda: lane.send([torch.ones(2, device="meta")], 1 - rank)
        )
        with FakeTensorMode():
            fake = torch.ones(2)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for tensor in (torch.ones(2).to_sparse(), fake, nested):
            assert "plain, dense, strided" in error_of(partial(lane.send, [tensor], 1 - rank))
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
        assert "tensor 0, quint8, cannot travel" in error_of(lambda: lane.send([quantized], 1 - rank))
    assert "not quantized, got quint8" in error_of(lambda: lane.empty([2], torch.quint8))
    assert "overlaps itself" in error_of(
        lambda: lane.recv([torch.ones(1).expand(3)], SENDER if rank else LEADER)
    )
    work, arrived = launch(lane, [torch.arange(5.0)])  # a refused call leaves no trace
    work.wait()
    assert torch.equal(arrived[0], torch.arange(5.0))
    lane.close()
    lane.close()
    assert "is closed" in error_of(lambda: launch(lane, [torch.ones(2)]))
    assert "got neither" in error_of(lambda: Lane("none", p2p=None, stage=None))
    assert "chunk_bytes" in error_of(lambda: Lane("x", p2p=dist.group.WORLD, stage=None, chunk_bytes=0))


def test_bad_calls_are_refused_by_name_and_leave_the_lane_in_step(pool: RankPool) -> None:
    pool.run(_bad_calls)
