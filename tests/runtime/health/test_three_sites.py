"""Three sites, one link of which stays down: all ranks name it, and none names a rank that is fine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pipeline_jobs import build

import ldt
from ldt._torch_private import TCPStore
from ldt.testing import toy_chunks, toy_microbatches
from ldt.topology import Topology

pytestmark = pytest.mark.slow

SITES = ("edge", "north", "south")
TOPOLOGY = Topology([1, 1, 1], sites=SITES)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=30)


@contextmanager
def three_hosts() -> Iterator[str]:
    """Namespaces ``name``-0 to ``name``-2, whose addresses are 10.99.0.2 to 10.99.2.2, with the router ``name``-r."""
    name = f"ldt-{os.getpid()}"
    router = f"{name}-r"
    with ExitStack() as undo:
        for host in ("r", *range(3)):
            run(f"ip netns add {name}-{host}")
            undo.callback(run, f"ip netns del {name}-{host}")
        run(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
        for host in range(3):
            run(f"ip -n {router} link add r{host} type veth peer name card netns {name}-{host}")
            for place, card, last in ((router, f"r{host}", 1), (f"{name}-{host}", "card", 2)):
                run(f"ip -n {place} address add 10.99.{host}.{last}/24 dev {card}")
                run(f"ip -n {place} link set {card} up")
            run(f"ip -n {name}-{host} link set lo up")
            run(f"ip -n {name}-{host} route add default via 10.99.{host}.1")
        run(f"ip netns exec {router} nft add table ip links")
        run(f"ip netns exec {router} nft add chain ip links cut {{ type filter hook forward priority 0 ; }}")
        yield name


def cut(name: str, one: int, other: int) -> None:
    for source, target in ((one, other), (other, one)):
        rule = f"ip saddr 10.99.{source}.2 ip daddr 10.99.{target}.2 drop"
        run(f"ip netns exec {name}-r nft add rule ip links cut {rule}")


def run_rank(rank: int, name: str, folder: str) -> None:
    """Train until something fails, and say what. The store is at the edge."""
    from two_hosts import Place

    Place(f"{name}-{rank}", "card").enter()
    torch.set_num_threads(1)
    store = TCPStore("10.99.0.2", 29500, 3, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    limits = {"heartbeat_timeout": timedelta(seconds=6), "outage": timedelta(seconds=3)}
    chunks, batch = toy_chunks(TOPOLOGY), toy_microbatches(4)
    try:
        with ldt.connect(TOPOLOGY, **limits) as mesh:
            pipeline = build(mesh, chunks)
            for _ in range(1000):
                pipeline.step(batch if mesh.is_edge else None)
                (Path(folder) / f"began-{rank}").touch()
                time.sleep(0.05)
    except ldt.LdtError as error:
        (Path(folder) / f"error-{rank}").write_text(json.dumps(str(error)))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    if os.getuid() or shutil.which("nft") is None or shutil.which("ip") is None:
        pytest.skip("three hosts need root, ip and nft")
    with three_hosts() as name:
        yield name


@pytest.mark.parametrize("down", [1, 2])
def test_all_ranks_name_the_link_that_is_down(tmp_path: Path, hosts: str, down: int) -> None:
    """Between the edge, which has the store, and another site. The third one reaches both."""
    ranks = mp.start_processes(run_rank, (hosts, str(tmp_path)), nprocs=3, join=False, start_method="spawn")
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("began-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    cut(hosts, 0, down)
    while not ranks.join(timeout=1):
        assert time.monotonic() < deadline, [process.kill() for process in ranks.processes]
    for rank in range(3):
        ends = (SITES[down], "edge") if rank == down else ("edge", SITES[down])
        error = json.loads((tmp_path / f"error-{rank}").read_text())
        assert f"the link between site {ends[0]} and site {ends[1]} has been down since" in error
