"""A firewall lets one site open no connections: connect works if gloo opens none from there, or every rank says so."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ldt
from ldt._torch_private import TCPStore
from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.mesh.reachability import Hosts, check_dials
from ldt.topology import Topology

TOPOLOGY = Topology([1, 1, 1])
SITES = (0, 1, 1)


def run_rank(rank: int, folder: str, places: list[Any], address: str, store_rank: int) -> None:
    """Connect, with the store beside ``store_rank``. Writes the error if any, and the rank that is taken for it."""
    places[rank].enter()
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)
    store = TCPStore(address, 29500, 3, rank == store_rank, limit, wait_for_workers=False)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # the default group would wait in vain before connect
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    try:
        with ldt.connect(TOPOLOGY, timeout=timedelta(seconds=8)) as mesh:
            assert mesh.control.sum([1.0]) == [3.0]
            assert len(mesh._groups._connections["control/leaders"]) > 0, "they are made at once all the same"
            answer = ["", mesh.rank_info.store_rank]
    except ldt.LdtError as error:
        answer = [str(error), store_rank]
    (Path(folder) / str(rank)).write_text(json.dumps(answer))
    store.add("done", 1)
    deadline = time.monotonic() + 20
    while rank == store_rank and store.add("done", 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.usefixtures("wide_area")
@pytest.mark.parametrize(
    ("edge", "blocked"),
    [
        (0, 1),  # the larger address is that of the cloud
        (1, 0),
        pytest.param(0, 0, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_blocked_direction_is_named_if_gloo_needs_it(tmp_path: Path, edge: int, blocked: int) -> None:
    """The store is where connections are let in. ``edge`` and ``blocked`` are ends of the link."""
    from wan_link import ADDRESSES, Settings, wide_area_link

    ends = [edge, 1 - edge, 1 - edge]
    with wide_area_link(Settings(12.5e6, 0.005)) as link:
        link.set(blocked, no_syn=1)
        places = [link.places[end] for end in ends]
        inputs = (str(tmp_path), places, ADDRESSES[blocked], ends.index(blocked))
        ranks = mp.start_processes(run_rank, inputs, nprocs=3, join=False, start_method="spawn")
        deadline = time.monotonic() + 90
        while not ranks.join(timeout=1):
            assert time.monotonic() < deadline, [process.kill() for process in ranks.processes]
    for rank in range(3):
        error, store_rank = json.loads((tmp_path / str(rank)).read_text())
        assert SITES[store_rank] == SITES[ends.index(blocked)]
        if blocked == 0:
            assert error == ""
            continue
        site = SITES[ends.index(1)]
        assert f"of site {site} (10.88.0.2) cannot open a connection to rank " in error
        # Half of what is left of the timeout once all ranks have checked in.
        assert re.search(rf"of site {1 - site} \(10.88.0.1\): no answer for [1-4] s\. ", error)
        assert f"Let the firewall of site {1 - site} admit 10.88.0.2 to the ports" in error


@pytest.mark.parametrize(("near", "store_rank"), [((0,), 0), ((2,), 2), ((1, 2), 1), ((0, 1), 0), ((), 0)])
def test_the_store_is_where_one_site_has_it(near: tuple[int, ...], store_rank: int) -> None:
    """Through tunnels, several sites may take it for their own."""
    facts = {rank: {"store": "here" if rank in near else ""} for rank in range(3)}
    assert Hosts.of(facts, RankInfo(TOPOLOGY, (0, 1, 2), 0)).store_rank == store_rank


@pytest.mark.parametrize("address", ["10.0.0.1:70000", "10.0.0.1:0", "10.0.0:1", "10.0.0.1"])
def test_an_address_that_is_none_names_its_rank(address: str) -> None:
    watchdog: Any = None  # not asked before addresses are read
    info = RankInfo(TOPOLOGY, (0, 1, 2), 0)
    with pytest.raises(ldt.LdtError, match="connect: rank 1 sent malformed data"):
        check_dials(info, {0: "10.0.0.9:1", 1: address}, {1}, watchdog, 1.0)
