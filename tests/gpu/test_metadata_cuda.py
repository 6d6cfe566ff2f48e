"""Metadata of masks on a GPU: the bytes equal those of the CPU, and unpacking does not wait for the device."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ldt.errors import MetadataError
from ldt.runtime.step.metadata import MicrobatchMetadata, StepMessage, has_metadata_kernels, pack, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KINDS = ("none", "left", "right", "both", "packed", "holes", "empty", "numbers")
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LENGTHS = (1, 2, 31, 32, 33, 100, 255, 256, 257, 1000, 4096, 8192, 10000, 40000)


def row_of(kind: str, length: int, draw: random.Random) -> torch.Tensor:
    row = torch.zeros(length, dtype=torch.int64)
    begin = draw.randint(0, length) if kind in ("left", "both", "packed") else 0
    end = draw.randint(begin, length) if kind in ("right", "both", "packed") else length
    if kind == "holes":
        row = torch.tensor([draw.getrandbits(1) for _ in range(length)])
    elif kind == "numbers":
        row = torch.tensor([draw.randint(-3, 3) for _ in range(length)])
    elif kind != "empty":
        row[begin:end] = 1
    if kind == "packed":
        for start in sorted(draw.sample(range(begin, end), min(5, end - begin)))[1:]:
            row[start:end] += 1
    return row


def positions_of(mask: torch.Tensor, rule: str) -> torch.Tensor:
    kept = mask != 0
    count = (kept.long().cumsum(-1) - 1).masked_fill(~kept, 1)
    match rule:
        case "arange":
            return torch.arange(mask.shape[-1])
        case "segments":
            index = torch.arange(mask.shape[-1]).expand(mask.shape)
            begins = kept & (mask != torch.nn.functional.pad(mask, (1, 0))[..., :-1])
            return (index - (index * begins).cummax(-1).values).masked_fill(~kept, 1)
        case "axes":
            return torch.stack([count, count // 3, count % 3])
        case _:
            return count.int()


def random_microbatch(index: int, draw: random.Random) -> MicrobatchMetadata:
    length = draw.choice(LENGTHS)
    rows = [row_of(draw.choice(KINDS), length, draw) for _ in range(draw.randint(1, 4))]
    mask = torch.stack(rows).to(draw.choice(DTYPES))
    tensors = {
        "attention_mask": mask,
        "position_ids": positions_of(mask.long(), draw.choice(("arange", "count", "segments", "axes"))),
        "image_grid_thw": torch.tensor(
            [[1, draw.randint(1, 90), 4]] * draw.randint(0, 3), dtype=torch.int64
        ).reshape(-1, 3),
        "cu_seqlens": torch.tensor([0, 5, 9]).int(),
    }
    names = draw.sample(sorted(tensors), draw.randint(1, 4))
    return MicrobatchMetadata(index, (), {name: tensors[name] for name in names})


def step_of(microbatches: list[MicrobatchMetadata]) -> StepMessage:
    return StepMessage("step", "plan", "setting", None, tuple(microbatches))


def on_gpu(message: StepMessage, keep: float = 1.0, draw: random.Random | None = None) -> StepMessage:
    """The message with its tensors on the GPU, each with probability ``keep``."""
    draw = draw or random.Random(0)
    return step_of(
        [
            MicrobatchMetadata(
                microbatch.id,
                microbatch.hops,
                {
                    name: tensor.cuda() if draw.random() < keep else tensor
                    for name, tensor in microbatch.tensors.items()
                },
            )
            for microbatch in message.microbatches
        ]
    )


def assert_rebuilt(message: StepMessage, data: torch.Tensor, device: str) -> None:
    rebuilt = unpack(data, device)
    assert isinstance(rebuilt, StepMessage)
    for want, have in zip(message.microbatches, rebuilt.microbatches, strict=True):
        assert set(want.tensors) == set(have.tensors)
        for name, tensor in want.tensors.items():
            got = have.tensors[name]
            assert (got.dtype, got.shape, got.device.type) == (tensor.dtype, tensor.shape, device)
            assert torch.equal(got.cpu(), tensor), f"{name} of microbatch {want.id}"


def test_this_build_has_kernels() -> None:
    assert has_metadata_kernels(torch.device("cuda"))


@pytest.mark.parametrize("seed", range(60))
def test_bytes_equal_those_of_the_cpu(seed: int) -> None:
    draw = random.Random(seed)
    message = step_of([random_microbatch(index, draw) for index in range(draw.randint(1, 6))])
    data = pack(message)
    assert pack(on_gpu(message)).tolist() == data.tolist()
    assert pack(on_gpu(message, 0.5, draw)).tolist() == data.tolist()
    assert_rebuilt(message, data, "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_masks_of_each_kind(kind: str, length: int) -> None:
    draw = random.Random(length)
    mask = torch.stack([row_of(kind, length, draw) for _ in range(3)])
    for rule in ("arange", "count", "segments", "axes"):
        tensors = {"attention_mask": mask, "position_ids": positions_of(mask, rule)}
        message = step_of([MicrobatchMetadata(0, (), tensors)])
        data = pack(message)
        assert pack(on_gpu(message)).tolist() == data.tolist()
        assert_rebuilt(message, data, "cuda")


def padded_step() -> StepMessage:
    draw = random.Random(1)
    masks = [torch.stack([row_of("left", 4096, draw) for _ in range(4)]) for _ in range(64)]
    return step_of(
        [
            MicrobatchMetadata(
                index, (), {"attention_mask": mask, "position_ids": positions_of(mask, "count")}
            )
            for index, mask in enumerate(masks)
        ]
    )


def cuda_events(call: object) -> list[str]:
    assert callable(call)
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in recorded.events() if event.device_type == on_device]


def test_one_launch_and_one_copy_back() -> None:
    message = on_gpu(padded_step())
    events = cuda_events(lambda: pack(message))
    assert sum("scan_rows" in name for name in events) == 1
    assert sum("DtoH" in name for name in events) == 1
    assert len(events) == 3, events  # and the table of jobs to the device
    data = pack(message)
    events = cuda_events(lambda: unpack(data, "cuda"))
    assert sum("rebuild_rows" in name for name in events) == 1
    assert sum("DtoH" in name for name in events) == 0
    assert len(events) == 2, events


def test_unpack_does_not_wait_and_pack_reads_what_is_queued() -> None:
    message = padded_step()
    data = pack(message)
    unpack(data, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        rebuilt = unpack(data, "cuda")
        assert not side.query()
        assert pack(rebuilt).tolist() == data.tolist()


def test_the_host_memory_of_an_unpack_lives_until_it_is_copied() -> None:
    draw = random.Random(3)
    messages = [step_of([random_microbatch(index, draw) for index in range(4)]) for _ in range(20)]
    packed = [pack(message) for message in messages]
    torch.cuda._sleep(100_000_000)
    rebuilt = [unpack(data, "cuda") for data in packed]
    for message, got, data in zip(messages, rebuilt, packed, strict=True):
        assert pack(got).tolist() == data.tolist()
        assert_rebuilt(message, data, "cpu")


def test_threads_and_streams_at_once() -> None:
    draw = random.Random(5)
    messages = [step_of([random_microbatch(index, draw) for index in range(4)]) for _ in range(8)]
    there = [on_gpu(message) for message in messages]
    truth = [pack(message).tolist() for message in messages]
    torch.cuda.synchronize()

    def round_trips(number: int) -> list[bool]:
        right = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(40):
                index = (number + turn) % len(messages)
                data = pack(there[index])
                right.append(data.tolist() == truth[index] == pack(unpack(data, "cuda")).tolist())
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(all(right) for right in pool.map(round_trips, range(4)))


def test_packing_under_capture_is_refused_and_the_capture_continues() -> None:
    message = on_gpu(padded_step())
    data = pack(message)
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(MetadataError, match="being captured"):
            pack(message)
        with pytest.raises(MetadataError, match="being captured"):
            unpack(data, "cuda")
        counter += 1
    graph.replay()
    assert counter.item() == 1
    assert pack(message).tolist() == data.tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    message = padded_step()
    data = pack(message)
    there = unpack(data, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert pack(there).tolist() == data.tolist()
    mask = torch.ones(2, 3, dtype=torch.int64)
    split = {"attention_mask": mask.cuda(0), "position_ids": mask.cuda(1)}
    with pytest.raises(MetadataError, match="one device"):
        pack(step_of([MicrobatchMetadata(0, (), split)]))
