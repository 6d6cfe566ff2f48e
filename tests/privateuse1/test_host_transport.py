"""Transport host on the test device: when it is chosen, and when a connection between the hosts is lost."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import npu
import pytest
import torch
import torch.distributed as dist
from npu_lanes import assert_all, forward_end, sized

import ldt
from ldt._C import CopyEngineLinks, HostSender, IpcSender, IsolatedStream, Lane, LaneError, SocketLink
from ldt.runtime.comm import ipc_links
from ldt.runtime.comm.socket_options import _UNSENT_BYTES
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 3


def _on_another_host(device: torch.device, offer: str, memory: Any = None) -> IpcSender:
    """IPC links to ranks 1 and 2 from rank 0 fail, as between hosts."""
    if dist.get_rank() == 0 or memory is None:
        raise LaneError("it is on another host")
    return IpcSender(device, offer, memory)


def _apart(transport: str, tp: list[int]) -> set[str]:
    """The kinds of this rank's lanes where IPC links work in a stage alone; sends a message over the first."""
    ipc_links.IpcSender, before = _on_another_host, ipc_links.IpcSender  # type: ignore[misc,assignment]
    try:
        with npu.late(5, 200) as device, ldt.connect(Topology(tp), "hccl", transport=transport) as mesh:  # type: ignore[arg-type]
            end = forward_end(mesh)
            if end is not None:
                message = sized(device, (40 << 20) + 4, 3)
                if end.sends:
                    end.send([message], "data").wait()  # type: ignore[union-attr]
                else:
                    target = end.lane.empty(message.shape, message.dtype)
                    end.receive([target], "data").wait()
                    assert_all([(target == message).all()])
            return {mesh.transport_of(channel) for channel in mesh.endpoints}
    except ldt.LdtError as error:
        return {str(error)}
    finally:
        ipc_links.IpcSender = before  # type: ignore[misc]


def test_auto_takes_host_memory_between_hosts(pool: RankPool) -> None:
    assert pool.run(_apart, "auto", [1, 2], timeout=60) == [{"host"}] * 3


def test_within_a_site_the_groups_are_left(pool: RankPool) -> None:
    edge, *cloud = pool.run(_apart, "auto", [1, 1, 1], timeout=60)
    assert edge == {"host"}
    assert cloud == [{"host", "c10d"}] * 2
    edge, *cloud = pool.run(_apart, "host", [1, 1, 1], timeout=60)
    assert edge == {"host"}
    assert cloud == [{"host", "c10d"}] * 2


def _connections_over(transport: str) -> str:
    npu.start()
    torch.accelerator.set_device_index(dist.get_rank())
    with pytest.raises(ValueError, match="connections") as error:
        ldt.connect(Topology([1, 1, 1]), "hccl", transport=transport, connections=2)  # type: ignore[arg-type]
    return str(error.value)


def test_connections_of_another_transport_are_refused(pool: RankPool) -> None:
    for text in pool.run(_connections_over, "copy_engine", timeout=60):
        assert "connections=2 are those of transport 'host'" in text
        assert "got transport='copy_engine'" in text


def _cut_links() -> None:
    """Shut down the connections of this process's socket links."""
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.fromfd(int(name.name), socket.AF_INET, socket.SOCK_STREAM) as one:
            if one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == _UNSENT_BYTES:
                one.shutdown(socket.SHUT_RDWR)


def _lost_connection(copy_engine: bool) -> tuple[str, float]:
    """What this rank learns of a connection that is lost while others wait on their devices, and after how long."""
    with npu.late(6, 0, copy_engine=copy_engine):
        mesh = ldt.connect(Topology([1, 1, 1]), "hccl", transport="host", connections=1)
        end = forward_end(mesh)
        if end is not None and not end.sends:
            end.receive([end.lane.empty((8,), torch.int64)], "data")
        dist.barrier()
        start, text = time.monotonic(), ""
        if dist.get_rank() == 0:
            _cut_links()
        while not text and time.monotonic() - start < 30:
            try:
                mesh.watchdog.check()
            except ldt.LdtError as error:
                text = str(error)
            time.sleep(0.01)
        took = time.monotonic() - start
        mesh.close()
        return text, took


@pytest.mark.parametrize("copy_engine", [True, False])
def test_a_lost_connection_is_named_on_all_ranks(pool: RankPool, copy_engine: bool) -> None:
    for text, took in pool.run(_lost_connection, copy_engine, timeout=60):
        assert re.search("the connections to rank [0-2]: ", text), text
        assert "transfer_timeout" not in text
        assert took < 15


def _dropped_while_it_sends() -> int:
    """A lane and its link are dropped while the link sends the last piece. Returns how many bytes came."""
    npu.start()
    torch.accelerator.set_device_index(dist.get_rank())
    device, p2p = torch.device("npu", dist.get_rank()), npu.hccl_group(0, 1)
    if dist.get_rank() != 0:
        return 0
    own, other = socket.socketpair()
    link = SocketLink([own.detach()], name="the connection to rank 1")
    ends = CopyEngineLinks(
        stream=IsolatedStream(device),
        memory=None,
        senders={1: HostSender(device, link, 0)},
        receivers={},
        from_stage=None,
        to_stage=None,
    )
    lane = Lane("dropped", p2p=p2p, stage=None, device=device, transport=ends)
    lane.send([torch.ones(1 << 20, device=device)], 1).wait()
    torch.accelerator.synchronize()
    lane.close()
    came = len(other.recv(1024))
    del lane, ends, link
    other.settimeout(20)
    while part := other.recv(1 << 20):
        came += len(part)
    return came


def test_the_thread_of_a_link_does_not_own_it(pool: RankPool) -> None:
    came, *_ = pool.run(_dropped_while_it_sends, timeout=60)
    assert 0 < came < 4 << 20  # the link ended when it was dropped
