"""Runs the two ranks of a trial: connects them, transfers, compares and times messages both ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ldt
from ldt.runtime import Mesh
from ldt.testing.fused_pair import FusedPair

__all__ = ["exchange"]

_TIMEOUT = timedelta(seconds=50)
_SMALL = 1 << 10  # bytes
_BIG_ON_HOST, _BIG_ON_DEVICE = 8 << 20, 64 << 20
_UP, _DOWN = "F0:0.0->1.0", "F1:1.0->0.0"


def exchange(order: dict[str, Any], report: Callable[..., None]) -> None:
    """Called on both ranks. Raises the error of a broken lane, or AssertionError for wrong bytes."""
    report(phase="connect")
    device = _join(order)
    transport, backend = order["transport"], order["backend"].split(":")[-1]
    mesh = _connect(transport, device, report)
    if mesh is None:
        return
    nbytes = _BIG_ON_HOST if device.type == "cpu" else _BIG_ON_DEVICE
    with mesh:
        report(phase="small messages")
        small = _one_way_seconds(mesh, _SMALL, repeats=100)
        report(phase="big messages")
        big = _one_way_seconds(mesh, nbytes, repeats=5)
        report(phase="a send that is refused")
        _expect_error(mesh)
    report(phase="a broadcast")
    _broadcast(device, transport, backend)
    report(phase="the end", microseconds=1e6 * small, gigabytes_per_second=1e-9 * nbytes / big)
    dist.destroy_process_group()


def _join(order: dict[str, Any]) -> torch.device:
    """Form a world of two and choose this rank's device."""
    torch.set_num_threads(1)
    rank, device = order["rank"], torch.device(order["device"])
    if device.type != "cpu":
        devices = getattr(torch, device.type)
        device = torch.device(device.type, rank % devices.device_count())
        devices.set_device(device)
    store = dist.TCPStore("127.0.0.1", order["port"], None, False, timeout=_TIMEOUT)  # type: ignore[attr-defined]  # documented
    dist.init_process_group(order["backend"], store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    return device


def _connect(transport: Any, device: torch.device, report: Callable[..., None]) -> Mesh | None:
    """Connect an edge and a cloud stage. Returns None and reports why if the machine lacks the transport."""
    try:
        return ldt.connect(
            ldt.Topology(tp=[1, 1]),
            transport=transport,
            device=device,
            timeout=_TIMEOUT,
            transfer_timeout=_TIMEOUT,
        )
    except ldt.LdtError as error:
        if transport != "copy_engine" or "can use the copy engine" not in str(error):
            raise
        report(refused=str(error))
        return None


def _one_way_seconds(mesh: Mesh, nbytes: int, repeats: int) -> float:
    """Half of the median round trip of ``repeats``, after one to warm up. Compares all bytes."""
    seconds = []
    for turn in range(repeats + 1):
        message = _random_bytes(nbytes, seed=turn).to(mesh.device)
        _round_trip(mesh, message[:1])  # until the other rank has its message ready, too
        start = time.perf_counter()
        arrived = _round_trip(mesh, message)
        seconds.append(time.perf_counter() - start)
        _compare([message], [arrived])
    return statistics.median(seconds[1:]) / 2


def _round_trip(mesh: Mesh, message: torch.Tensor) -> torch.Tensor:
    """The edge sends ``message`` and the cloud sends it back. Returns the tensor received on this rank."""
    endpoints = {channel.name: endpoint for channel, endpoint in mesh.endpoints.items()}
    up, down = endpoints[_UP], endpoints[_DOWN]
    arrived = (down if mesh.is_edge else up).lane.empty(message.shape, message.dtype)
    if mesh.is_edge:
        works = [up.send([message], "there"), down.receive([arrived], "back")]
    else:
        up.receive([arrived], "there").wait()
        works = [down.send([arrived], "back")]
    for work in works:
        assert work is not None
        work.wait()
    _synchronize(mesh.device)
    return arrived


def _expect_error(mesh: Mesh) -> None:
    """Check that an exception crosses from C++ to Python."""
    endpoint = next(endpoint for endpoint in mesh.endpoints.values() if endpoint.sends)
    try:
        endpoint.send([torch.ones(2, device=mesh.device).to_sparse()], "sparse")
    except ldt.LaneError:
        return
    raise AssertionError("a lane accepted a sparse tensor, which it cannot send")


def _broadcast(device: torch.device, transport: str, backend: str) -> None:
    """Send from rank 0 to the leader of a stage, rank 1, which broadcasts to its member, again rank 0."""
    pair = FusedPair(device, transport, backend=backend, timeout=_TIMEOUT)
    plain = _random_bytes(3 << 20, seed=7)
    message = [plain.to(device), plain[:4000].view(torch.float32).view(10, 100).t().to(device)]
    works, arrived = pair.launch(message)
    for work in works:
        work.wait()
    _synchronize(device)
    _compare(message, arrived)
    pair.close()


def _random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    """The same on both ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _compare(sent: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> None:
    """Compare bytes, because a NaN does not equal itself."""
    for index, pair in enumerate(zip(sent, arrived, strict=True)):
        left, right = (tensor.contiguous().view(torch.uint8) for tensor in pair)
        wrong = int((left != right).sum())
        if wrong:
            raise AssertionError(f"{wrong} of {left.numel()} bytes of tensor {index} are not what was sent")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
