"""Lanes on streams.

NCCL takes one rank per GPU, and a fused receive has a sender, a leader and a member: here rank 0 is the sender and
also the member.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from sharing import my_device

import ldt
from ldt._C import LaneError
from ldt.runtime.comm.transports import TransportChoice
from ldt.testing import RankPool
from ldt.testing.fused_pair import LEADER, SENDER, FusedPair

WORLD_SIZE = 2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CYCLES = 20_000_000  # of torch.cuda._sleep: about 10 ms


TRANSPORTS = ["c10d", "nccl", "copy_engine"]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def make_pair(transport: str, *, chunk_bytes: int = 1 << 20) -> FusedPair:
    device = my_device()
    return FusedPair(device, transport, chunk_bytes=chunk_bytes)


def _any_tensors(transport: str) -> None:
    pair = make_pair(transport, chunk_bytes=4096)
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


@each_transport
def test_any_tensors_arrive_bit_exact(pool: RankPool, transport: str) -> None:
    pool.run(_any_tensors, transport, timeout=120)


def _side_stream_rounds(transport: str, rounds: int) -> None:
    pair = make_pair(transport)
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
    assert pair.receiver.stats()["pool_bytes"] <= 4 << 21
    pair.close()


@each_transport
def test_late_sources_and_early_reuse_on_a_side_stream(pool: RankPool, transport: str) -> None:
    pool.run(_side_stream_rounds, transport, 500, timeout=120)


def _host_does_not_block(transport: str) -> tuple[bool, bool]:
    pair = make_pair(transport)
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


@each_transport
def test_neither_launch_nor_wait_blocks_the_host(pool: RankPool, transport: str) -> None:
    for busy, done_early in pool.run(_host_does_not_block, transport, timeout=60):
        assert busy
        assert not done_early


def _large_both_ways(transport: TransportChoice) -> None:
    rank, device = dist.get_rank(), my_device()
    with ldt.connect(ldt.Topology([1, 1]), "nccl", transport=transport, device=device) as mesh:
        forward = [end for channel, end in mesh.endpoints.items() if channel.direction == "F"]
        outgoing, incoming = sorted(forward, key=lambda end: not end.sends)
        for first in range(0, 8, 4):
            works, targets = [], []
            for microbatch in range(first, first + 4):
                message = torch.full((64 << 20,), rank * 8 + microbatch, device=device, dtype=torch.bfloat16)
                works.append(outgoing.send([message], "out"))
                targets.append(incoming.lane.empty([64 << 20], torch.bfloat16))
                works.append(incoming.receive([targets[-1]], "in"))
            for work in works:
                assert work is not None
                work.wait()
            for microbatch, target in zip(range(first, first + 4), targets, strict=True):
                assert (target == (1 - rank) * 8 + microbatch).all()


@each_transport
def test_128_mib_both_ways_do_not_block_one_another(pool: RankPool, transport: TransportChoice) -> None:
    pool.run(_large_both_ways, transport, timeout=60)


def _abort_of_a_receive(transport: str) -> None:
    pair = make_pair(transport)
    for work in pair.launch([torch.ones(4, device=pair.device)])[0]:
        work.wait()
    torch.cuda.synchronize()
    if pair.rank == SENDER:
        return
    target = torch.zeros(4, device=pair.device)
    work = pair.receiver.recv([target], SENDER)  # for a message that never comes
    start = time.monotonic()
    pair.receiver.abort("stage 0 has failed")
    with pytest.raises(LaneError, match="stage 0 has failed"):
        work.wait()
    pair.receiver.close()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 20


@each_transport
def test_an_abort_frees_the_device(pool: RankPool, transport: str) -> None:
    pool.run(_abort_of_a_receive, transport, timeout=60)


def _same_tensor_twice(transport: str) -> None:
    pair = make_pair(transport)
    target = pair.receiver.empty([1 << 18], torch.float32)
    seen = []
    for value in range(50):
        source = torch.full((1 << 18,), float(value), device=pair.device)
        works = [pair.sender.send([source], LEADER)] if pair.rank == SENDER else []
        works.append(pair.receiver.recv([target], SENDER))
        for work in works:
            work.wait()
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        seen.append((target == value).all())
    assert torch.stack(seen).all()
    pair.close()


@each_transport
def test_a_second_receive_into_a_tensor_waits_for_its_reader(pool: RankPool, transport: str) -> None:
    pool.run(_same_tensor_twice, transport, timeout=60)


def _late_receiver(transport: str) -> None:
    """Messages sent long before a receive is posted, and into memory that is not the lane's."""
    pair = make_pair(transport)
    sizes = [1, 1000, 1 << 20, (5 << 20) + 3]
    messages = [torch.arange(size, device=pair.device).to(torch.uint8) for size in sizes]
    works = [pair.sender.send([message], LEADER) for message in messages] if pair.sender else []
    if pair.rank == LEADER:
        time.sleep(0.3)
    targets = [torch.zeros(size, device=pair.device, dtype=torch.uint8) for size in sizes]
    works += [pair.receiver.recv([target], SENDER) for target in targets]
    for work in works:
        work.wait()
    assert all(map(torch.equal, targets, messages))
    pair.close()


@each_transport
def test_a_late_receive_loses_nothing(pool: RankPool, transport: str) -> None:
    pool.run(_late_receiver, transport, timeout=60)


def _more_messages_than_entries() -> None:
    pair = make_pair("copy_engine")
    total = torch.zeros((), device=pair.device)
    for number in range(3000):
        works, (target,) = pair.launch([torch.full((8,), float(number), device=pair.device)])
        for work in works:
            work.wait()
        total += (target != number).sum()
    assert total == 0
    pair.close()


def test_the_message_ring_wraps_around(pool: RankPool) -> None:
    pool.run(_more_messages_than_entries, timeout=60)


def _captured(transport: str) -> None:
    pair = make_pair(transport)
    message = torch.ones(4, device=pair.device)
    for work in pair.launch([message])[0]:
        work.wait()
    torch.cuda.synchronize()
    graph, side, target = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros_like(message)
    with torch.cuda.graph(graph, stream=side):
        doubled = message * 2
        with pytest.raises(LaneError, match="being captured into a graph"):
            pair.receiver.recv([target], SENDER)
        if pair.sender is not None:
            with pytest.raises(LaneError, match="being captured into a graph"):
                pair.sender.send([doubled], LEADER)
    graph.replay()
    works, (target,) = pair.launch([doubled])  # the lanes remain usable
    for work in works:
        work.wait()
    assert (target == 2).all()
    pair.close()


@each_transport
def test_a_lane_refuses_to_be_captured(pool: RankPool, transport: str) -> None:
    pool.run(_captured, transport, timeout=60)


def _compute_goes_on() -> None:
    """A sender's lane that waits for its receiver must not block compute of the same rank."""
    device = my_device()
    with ldt.connect(ldt.Topology([1, 1], laps=2), "nccl", transport="copy_engine", device=device) as mesh:
        ends = list(mesh.endpoints.values())
        message = torch.ones(16 << 20, device=device)  # of 64 MiB: more than bounces at once
        # Loading a kernel waits for all queued work, so the kernels launched after a wait are loaded here.
        assert torch.equal(torch.zeros_like(message) + (message * 2).sum() * 0, message - 1)
        works = [end.send([message], "early") for end in ends if end.sends]
        dist.barrier()
        done = torch.cuda.Event()
        (message * 2).sum()
        done.record()
        start = time.monotonic()
        while not done.query() and time.monotonic() - start < 5:
            time.sleep(0.01)
        went_on = done.query()
        dist.barrier()
        targets = [(end, torch.zeros_like(message)) for end in ends if not end.sends]
        works += [end.receive([target], "late") for end, target in targets]
        for work in works:
            assert work is not None
            work.wait()
        assert all(torch.equal(target, message) for _, target in targets)
        assert went_on


def test_a_waiting_lane_does_not_block_compute(pool: RankPool) -> None:
    pool.run(_compute_goes_on, timeout=60)
