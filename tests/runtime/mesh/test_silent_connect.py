"""The link to the store goes down at any moment of connect: every rank raises in time and says so."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from silent_store import Link
from torch.distributed import PrefixStore, TCPStore

import ldt
from ldt.runtime.health import failure_detector
from ldt.testing import allowed, in_time, paced
from ldt.topology import Topology

TOPOLOGY = Topology([1, 1])
HEARTBEAT, OUTAGE, TIMEOUT = 1.0, 0.5, 3.0
SILENCE = HEARTBEAT + 2 * OUTAGE


def run_rank(rank: int, folder: str, port: int, moments: list[int]) -> None:
    """Connect, once for each of ``moments``: the messages to the store from rank 1 after which its link goes down."""
    torch.set_num_threads(1)
    failure_detector._MIN_STORE_TIMEOUT = timedelta(seconds=1)
    answers = [connect(rank, port, f"world {number}", after) for number, after in enumerate(moments)]
    (Path(folder) / str(rank)).write_text(json.dumps(answers))


def connect(rank: int, port: int, world: str, after: int) -> tuple[str, float]:
    """The error, if any, and after how many seconds."""
    with Link(port) as link:
        store = TCPStore("127.0.0.1", link.port if rank else port, None, False, timedelta(minutes=5))
        store = PrefixStore(world, store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()
        if rank:
            link.cut(after)
        start = time.monotonic()
        try:
            with ldt.connect(
                TOPOLOGY,
                timeout=paced(TIMEOUT),
                heartbeat_timeout=paced(HEARTBEAT),
                outage=paced(OUTAGE),
            ):
                while time.monotonic() - start < allowed(TIMEOUT) and not link.is_down:
                    time.sleep(0.05)
            error = ""
        except ldt.LdtError as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - start
        link.mend()
        dist.destroy_process_group()
    return error, seconds


@pytest.mark.parametrize("moments", [[1, 8], pytest.param(list(range(10)), marks=pytest.mark.slow)])
def test_every_rank_names_the_link_in_time(tmp_path: Path, moments: list[int]) -> None:
    """As ranks check in, as they begin to watch each other, as they make groups."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    inputs = (str(tmp_path), store.port, moments)
    ranks = mp.start_processes(run_rank, inputs, nprocs=2, join=False, start_method="spawn")
    deadline = time.monotonic() + 60 + allowed(12) * len(moments)
    while not ranks.join(timeout=1):
        assert time.monotonic() < deadline, [process.kill() for process in ranks.processes]
    limit = max(TIMEOUT + 2 * OUTAGE, SILENCE + 5.0) + 2.0
    for rank in range(2):
        for error, seconds in json.loads((tmp_path / str(rank)).read_text()):
            assert "the link" in error
            assert "outage" in error or "longer timeout" in error
            assert in_time(seconds, limit), error
