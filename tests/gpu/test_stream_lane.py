"""Lanes on streams, over NCCL on two GPUs (cases A2, A11, A12).

NCCL takes one rank per GPU, and a fused receive has a sender, a leader and a member: here rank 0 is the sender and
also the member. Skipped without two GPUs.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ldt._C import Lane, LaneError
from ldt.testing import RankPool

WORLD_SIZE = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SENDER, LEADER = 0, 1
CYCLES = 20_000_000  # of torch.cuda._sleep: about 10 ms


class FusedPair:
    """The two ends of a fused lane: rank 0 sends and hears the broadcast, rank 1 receives and broadcasts."""

    def __init__(self, *, announce: bool = False, chunk_bytes: int = 1 << 20) -> None:
        self.rank = dist.get_rank()
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        p2p, stage = (dist.new_group([0, 1], backend="nccl") for _ in range(2))
        common = {"device": self.device, "chunk_bytes": chunk_bytes, "announce": announce}
        if self.rank == SENDER:
            self.sends = Lane("sends", p2p=p2p, stage=None, **common)
            self.hears = Lane("hears", p2p=None, stage=stage, stage_root=LEADER, **common)
        else:
            self.hears = Lane("hears", p2p=p2p, stage=stage, stage_root=LEADER, **common)

    def launch(self, message: list[torch.Tensor]) -> tuple[list[dist.Work], list[torch.Tensor]]:
        works = [self.sends.send(message, LEADER)] if self.rank == SENDER else []
        targets = [self.hears.empty(tensor.shape, tensor.dtype) for tensor in message]
        return [*works, self.hears.recv(targets, SENDER)], targets

    def close(self) -> None:
        torch.cuda.synchronize()
        for lane in {self.hears, self.sends} if self.rank == SENDER else {self.hears}:
            lane.close()


def _any_tensors() -> None:
    pair = FusedPair(chunk_bytes=4096)
    for round_ in range(20):
        message = [
            torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(round_)).to(
                pair.device, torch.bfloat16
            ),
            torch.arange(40000, device=pair.device).view(100, 400).t() + round_,
            torch.tensor(round_ % 2 == 0, device=pair.device),
            torch.empty(0, 3, device=pair.device),
        ]
        works, targets = pair.launch(message)
        for work in works:
            work.wait()
        assert all(map(torch.equal, targets, message))
    pair.close()


def test_any_tensors_arrive_bit_exact(pool: RankPool) -> None:
    pool.run(_any_tensors, timeout=120)


def _side_stream_rounds(rounds: int) -> None:
    pair = FusedPair()
    side = torch.cuda.Stream()
    results = []
    with torch.cuda.stream(side):
        for round_ in range(rounds):
            torch.cuda._sleep(200_000)  # the source is late
            source = torch.full((1 << 19,), float(round_), device=pair.device)
            works, (target,) = pair.launch([source])
            for work in works:
                work.wait()
                work.wait()
            source.fill_(-1.0)  # overwritten right after: ordered behind the send by the wait
            torch.cuda._sleep(100_000)
            results.append((target == round_).all())
            del target  # back to the pool while its last use is still queued
    side.synchronize()
    assert torch.stack(results).all()
    assert pair.hears.stats()["pool_bytes"] <= 4 << 21
    pair.close()


def test_late_sources_and_early_reuse_on_a_side_stream(pool: RankPool) -> None:
    pool.run(_side_stream_rounds, 500, timeout=120)


def _host_does_not_block() -> tuple[bool, bool]:
    pair = FusedPair()
    pair.launch([torch.ones(4, device=pair.device)])
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES * 20)
    works, (target,) = pair.launch([torch.ones(1 << 20, device=pair.device)])
    for work in works:
        work.wait()
    busy = not torch.cuda.current_stream().query()
    done_early = works[-1].is_completed()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        works[-1].wait()  # a second stream may wait, too
        assert (target == 1).all()
    pair.close()
    return busy, done_early


def test_neither_launch_nor_wait_blocks_the_host(pool: RankPool) -> None:
    for busy, done_early in pool.run(_host_does_not_block, timeout=60):
        assert busy
        assert not done_early


def _large_both_ways() -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    lanes = [Lane(f"lane {i}", p2p=group, stage=None, device=device) for i, group in enumerate(groups)]
    outgoing, incoming = lanes[rank], lanes[1 - rank]
    for sender, lane in enumerate(
        lanes
    ):  # NCCL connects at first use: on all ranks in one order, as connect() does
        first = torch.zeros(1, device=device)
        (lane.send([first], 1 - rank) if rank == sender else lane.recv([first], sender)).wait()
    works, targets = [], []
    for microbatch in range(4):
        message = torch.full((64 << 20,), rank * 4 + microbatch, device=device, dtype=torch.bfloat16)
        works.append(outgoing.send([message], 1 - rank))
        targets.append(incoming.empty([64 << 20], torch.bfloat16))
        works.append(incoming.recv([targets[-1]], 1 - rank))
    for work in works:
        work.wait()
    for microbatch, target in enumerate(targets):
        assert (target == (1 - rank) * 4 + microbatch).all()


def test_128_mib_both_ways_do_not_block_one_another(pool: RankPool) -> None:
    pool.run(_large_both_ways, timeout=60)


def _mismatch() -> list[str]:
    pair = FusedPair(announce=True)
    texts = []
    shape = [4, 8] if pair.rank == SENDER else [4, 6]
    calls = (
        [lambda: pair.sends.send([torch.ones(4, 8, device=pair.device)], LEADER)]
        if pair.rank == SENDER
        else []
    )
    calls.append(lambda: pair.hears.recv([torch.ones(shape, device=pair.device)], SENDER))
    for call in calls:
        with pytest.raises(LaneError) as error:
            call()
        texts.append(str(error.value))
    pair.close()
    return texts


def test_announced_messages_are_checked(pool: RankPool) -> None:
    (sender, member), (leader,) = pool.run(_mismatch, timeout=60)
    for text in (sender, leader):
        assert "float32[4, 8]" in text
        assert "float32[4, 6]" in text
    assert "unlike this stage's leader" in member


def _abort_of_a_receive() -> None:
    pair = FusedPair()
    for work in pair.launch([torch.ones(4, device=pair.device)])[0]:
        work.wait()
    torch.cuda.synchronize()
    if pair.rank == SENDER:
        return
    target = torch.zeros(4, device=pair.device)
    work = pair.hears.recv([target], SENDER)  # of a message that never comes
    start = time.monotonic()
    pair.hears.abort("stage 0 has failed")
    with pytest.raises(LaneError, match="stage 0 has failed"):
        work.wait()
    pair.hears.close()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 20


def test_an_abort_frees_the_device(pool: RankPool) -> None:
    pool.run(_abort_of_a_receive, timeout=60)


def _same_tensor_twice() -> None:
    pair = FusedPair()
    target = pair.hears.empty([1 << 18], torch.float32)
    seen = []
    for value in range(50):
        source = torch.full((1 << 18,), float(value), device=pair.device)
        works = [pair.sends.send([source], LEADER)] if pair.rank == SENDER else []
        works.append(pair.hears.recv([target], SENDER))
        for work in works:
            work.wait()
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        seen.append((target == value).all())
    assert torch.stack(seen).all()
    pair.close()


def test_a_second_receive_into_a_tensor_waits_for_its_reader(pool: RankPool) -> None:
    pool.run(_same_tensor_twice, timeout=60)
