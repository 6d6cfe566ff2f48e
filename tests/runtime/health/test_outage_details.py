"""What counts as an outage, how a link that stays down is named, and the options of connections that outlast one."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from ldt.runtime.common.rank_info import RankInfo
from ldt.runtime.health import connections
from ldt.runtime.health.failure_detector import FailureDetector, HealthTimeouts
from ldt.runtime.health.heartbeat import Heartbeats
from ldt.runtime.health.outages import Outages
from ldt.runtime.health.progress import Progress
from ldt.topology import Topology

THREE_SITES = Topology([1, 1, 1], sites=["edge", "north", "south"])


def outages(rank: int, expected: bool = True) -> Outages:
    return Outages(RankInfo(THREE_SITES, (0, 1, 2), rank), expected)


def test_only_silence_of_another_site_counts_and_only_where_outages_are_expected() -> None:
    seen, others = outages(1), outages(1, expected=False)
    for each in (seen, others):
        each.answered(0, 2.9)
        each.answered(1, 60.0)
        each.answered(7, 60.0)
        each.answered(0, 60.0)
        each.answered(2, 60.0)  # at the same time
    assert (seen.take(), seen.take(), others.take()) == (1, 0, 0)


@pytest.mark.parametrize(
    ("rank", "site", "ends"),
    [
        (0, "south", "edge and site south"),
        (1, "south", "edge and site south"),
        (1, "edge", "north and site edge"),
    ],
)
def test_the_link_that_is_named_is_the_one_to_the_store(rank: int, site: str, ends: str) -> None:
    """Heartbeats pass through the store, so their absence says nothing of a link between two other sites."""
    assert f"the link between site {ends} has been down" in outages(rank).text(site, 5.0, 4.0)


def detectors(topology: Topology, lost: dict[int, list[str]], outage: float = 0.0) -> list[FailureDetector]:
    """Those of all ranks, on one store; ``lost`` are the connections that each has lost."""
    store, ranks = dist.HashStore(), tuple(range(topology.world_size))
    return [
        FailureDetector(
            RankInfo(topology, ranks, rank),
            store,
            "mesh",
            HealthTimeouts(outage=timedelta(seconds=outage)),
            shares_errors=True,
            on_failure=lambda report: None,
            force_abort=lambda: None,
            overdue=lambda: "",
            lost_connections=partial(lost.get, rank, []),
            addresses={0: "10.0.0.1:1", 1: "10.0.0.2:2", 2: "10.0.0.3:3"},
        )
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("silent", "story"),
    [
        (4.5, "the mesh has failed: the link between site edge and site north has been down since"),
        pytest.param(0.0, "rank 1 (stage 1, replica 0) failed first: no heartbeat", marks=pytest.mark.slow),
    ],
)
def test_a_site_that_gave_up_is_not_taken_for_killed(silent: float, story: str) -> None:
    """The site in the north closes its connections to the south because it does not reach the store, at the edge."""
    lost: dict[int, list[str]] = {}
    made = detectors(THREE_SITES, lost, outage=60.0)
    time.sleep(1.2)
    made[1].watchdog.close()
    time.sleep(silent)
    lost[2] = ["10.0.0.2:4711"]
    for rank in (2, 0):
        report = made[rank].watchdog.wait(10.0)
        assert report is not None
        assert report.describe().startswith(story)
    for each in made:
        each.watchdog.close()


@pytest.mark.parametrize(
    ("sites", "link"),
    [
        (["edge", "north", "south"], "the link between site north and site south was down for too long, or "),
        (["edge", "north", "north"], ""),
    ],
)
def test_lost_connections_are_named_if_all_ranks_are_alive(sites: list[str], link: str) -> None:
    made = detectors(Topology([1, 1, 1], sites=sites), {1: ["10.0.0.3:4711"]})
    report = made[0].watchdog.wait(10.0)
    assert report is not None
    assert report.rank is None
    start = "connections were reset: rank 1 lost those to 10.0.0.3:4711 while all ranks are alive"
    assert report.error.startswith(link + start)
    for each in made:
        each.watchdog.close()


def test_heartbeats_of_large_meshes_are_not_late() -> None:
    """4000 ranks beat every 3.2 s."""
    late: list[float] = []
    store, ranks = dist.HashStore(), range(4000)
    one = Heartbeats("seen", ranks, 0, Progress(), lambda rank, seconds: late.append(seconds))
    other = Heartbeats("seen", ranks, 1, Progress())
    for _ in range(3):
        other.beat_now(store)
        one.check_neighbour(store, 60.0)
        time.sleep(1.1)
    assert len(late) == 2
    assert max(late) < 0


@pytest.mark.parametrize("has_rto_max", [True, False])
def test_a_connection_outlasts_as_long_as_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch, has_rto_max: bool
) -> None:
    """Also before Linux 6.15, and where no transfer has a limit to speak of."""
    if not has_rto_max:
        monkeypatch.setattr(connections, "_RTO_MAX", 9999)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        for seconds, milliseconds in ((1800.0, 1_800_000), (1e10, 2**31 - 1)):
            connections.outlast(client, seconds)
            assert client.getsockopt(socket.IPPROTO_TCP, connections._USER_TIMEOUT) == milliseconds
