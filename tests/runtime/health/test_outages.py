"""A link between sites that is down for a while: the job goes on, and for too long: every rank says the same."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from faults.leak_check import borrowed_socket, reset, tcp_connections
from pipeline_jobs import build

import ldt
from ldt._torch_private import TCPStore
from ldt.runtime.comm.socket_links import Connections
from ldt.testing import toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

pytestmark = pytest.mark.usefixtures("wide_area")

WIDTH, STEPS = 64, 10
PORT = 29500  # of the store
TOPOLOGY = Topology([1, 1, 1])


class Reset(NamedTuple):
    """Of all connections to the store or of gloo that rank ``at`` has over the link, ``seconds`` after it went down."""

    of: Literal["the store", "gloo"]
    at: int
    seconds: float

    def run(self, mesh: ldt.Mesh, folder: str) -> None:
        while not (Path(folder) / "down").exists():
            time.sleep(0.01)
        time.sleep(self.seconds)
        of_gloo = {fd for group in mesh._groups._all_connections() for fd in group._opened}
        for found in tcp_connections():
            with borrowed_socket(found.fd) as connection:
                to_store = PORT in (found.peer_port, connection.getsockname()[1])
                if found.crosses and (to_store if self.of == "the store" else found.fd in of_gloo):
                    reset(connection)


def train(folder: str, when: str, cutting: Reset | None, options: dict[str, Any]) -> tuple[int, str]:
    """Train. The link goes down ``when`` it says. Returns the outages that were counted, and the error if any."""
    outages = 0

    def cut(moment: str) -> None:
        if moment == when and dist.get_rank() == 0:
            (Path(folder) / "down").touch()
            time.sleep(0.1)  # until it is down

    chunks, batch = toy_chunks(TOPOLOGY, width=WIDTH), toy_microbatches(4, width=WIDTH, batch=512)
    expected = copy.deepcopy(chunks)
    for _ in range(STEPS):
        apply(unsplit_step(expected, batch, toy_loss)[1], expected)
    options = {"heartbeat_timeout": timedelta(seconds=2), **options}
    try:
        cut("connect")
        with ldt.connect(TOPOLOGY, **options) as mesh:
            pipeline = build(mesh, chunks)
            if cutting is not None and mesh.rank == cutting.at:
                threading.Thread(target=cutting.run, args=(mesh, folder), daemon=True).start()
            mine = [chunks[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
            for step in range(STEPS):
                if step == 1 and when == "step" and mesh.is_edge:
                    mine[0].register_forward_hook(lambda *_: (Path(folder) / "down").touch())
                if step == 1:
                    cut("between steps")
                outages += pipeline.step(batch if mesh.is_edge else None).stats.outages
                apply(mine, mine)
                time.sleep(0.3)  # so that all ranks see within a step that the link is back
            cut("close")
            for index in TOPOLOGY.chunks_of(mesh.stage):
                pairs = zip(chunks[index].parameters(), expected[index].parameters(), strict=True)
                assert all(torch.equal(got, wanted) for got, wanted in pairs)
    except ldt.LdtError as error:
        return outages, f"{type(error).__name__}: {error}"
    return outages, ""


def apply(gradients: Any, chunks: Any) -> None:
    """One step of SGD, which drops the gradients."""
    with torch.no_grad():
        for chunk, source in zip(chunks, gradients, strict=True):
            for parameter, other in zip(chunk.parameters(), source.parameters(), strict=True):
                parameter.sub_(0.1 * other.grad)
                parameter.grad = other.grad = None


def run_rank(
    rank: int,
    folder: str,
    places: list[Any],
    when: str,
    store_rank: int,
    cutting: Reset | None,
    options: dict[str, Any],
) -> None:
    """A rank in its place, with the store in the process of ``store_rank``."""
    from wan_link import ADDRESSES

    places[rank].enter()
    torch.set_num_threads(1)
    address, size = ADDRESSES[min(store_rank, 1)], TOPOLOGY.world_size
    store = TCPStore(address, PORT, size, rank == store_rank, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    answer = train(folder, when, cutting, options)
    (Path(folder) / f"answer-{rank}").write_text(json.dumps([*answer, time.time()]))


def over_a_link(
    folder: Path,
    seconds: float,
    when: str = "step",
    store_rank: int = 0,
    cutting: Reset | None = None,
    **options: Any,
) -> list[tuple[int, str, float]]:
    """Train over a link that is down for ``seconds``. Of each rank: outages, error, and when it ended after that."""
    from wan_link import Settings, wide_area_link

    with wide_area_link(Settings(12.5e6, 0.01)) as link:
        places = [link.places[0], *[link.places[1]] * 2]
        ranks = mp.start_processes(
            run_rank,
            (str(folder), places, when, store_rank, cutting, options),
            nprocs=3,
            join=False,
            start_method="spawn",
        )
        deadline = time.monotonic() + 60
        while not (folder / "down").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for cut in (1, 0):
            for direction in (0, 1):
                link.set(direction, cut=cut)
            time.sleep(seconds * cut)
        back = time.time()
        deadline = time.monotonic() + 120
        while not ranks.join(timeout=1):
            assert time.monotonic() < deadline, [process.kill() for process in ranks.processes]
    answers = [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(3)]
    return [(outages, error, ended - back) for outages, error, ended in answers]


@pytest.mark.parametrize(
    ("seconds", "outage", "connections"),
    [
        pytest.param(4.0, 5, 2, marks=pytest.mark.slow),
        pytest.param(4.0, 5, None, marks=pytest.mark.slow),
        pytest.param(20.0, 20, 2, marks=pytest.mark.slow),
        pytest.param(20.0, 20, "auto", marks=pytest.mark.slow),
        pytest.param(60.0, 60, None, marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_after_an_outage(
    tmp_path: Path, seconds: float, outage: int, connections: Connections | None
) -> None:
    answers = over_a_link(tmp_path, seconds, outage=timedelta(seconds=outage), connections=connections)
    for outages, error, since in answers:
        assert error == ""
        assert outages == 1
        assert since < 3 * outage


@pytest.mark.slow
@pytest.mark.parametrize("connections", [None, 2])
@pytest.mark.parametrize("when", ["connect", "between steps", "close"])
def test_a_link_may_go_down_at_any_moment(tmp_path: Path, when: str, connections: Connections | None) -> None:
    answers = over_a_link(tmp_path, 8.0, when, outage=timedelta(seconds=8), connections=connections)
    assert [error for _, error, _ in answers] == ["", "", ""]
    if when == "between steps":
        assert [outages for outages, _, _ in answers] == [1, 1, 1]


@pytest.mark.parametrize("store_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_link_that_stays_down_is_what_every_rank_names(tmp_path: Path, store_rank: int) -> None:
    """Wherever the store is."""
    answers = over_a_link(tmp_path, 16.0, store_rank=store_rank, outage=timedelta(seconds=1))
    for (outages, error, _), sites in zip(
        answers, ("0 and site 1", "1 and site 0", "1 and site 0"), strict=True
    ):
        assert outages == 0
        assert f"the link between site {sites} has been down since" in error


@pytest.mark.parametrize(
    ("at", "seconds", "connections"),
    [
        (1, 1.5, 2),
        *(
            pytest.param(at, seconds, connections, marks=pytest.mark.slow)
            for at in (0, 1)
            for seconds in (0.1, 1.5, 4.05, 5.0)
            for connections in (None, 2)
            if (at, seconds, connections) != (1, 1.5, 2)
        ),
    ],
)
def test_a_reset_of_connections_to_the_store_is_mended(
    tmp_path: Path, at: int, seconds: float, connections: int | None
) -> None:
    """During an outage of 4 s, as it ends, and after it; at the end that has the store or at the other.

    What else crosses outlasts the outage, as do the connections of rank 2 if rank 1 has the reset.
    """
    cutting = Reset("the store", at, seconds)
    options = {"outage": timedelta(seconds=5), "heartbeat_timeout": timedelta(seconds=5)}
    answers = over_a_link(tmp_path, 4.0, cutting=cutting, connections=connections, **options)
    assert [(outages, error) for outages, error, _ in answers] == [(1, "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("seconds", [0.1, 1.5, 4.05, 5.0])
def test_reset_connections_of_gloo_are_named(tmp_path: Path, at: int, seconds: float) -> None:
    """Wherever ranks wait, all say the same soon after the link is back."""
    answers = over_a_link(tmp_path, 4.0, cutting=Reset("gloo", at, seconds), outage=timedelta(seconds=5))
    lost = r"lost those to 10\.88\.0\.[12]:\d+"
    for _, error, since in answers:
        assert re.search(rf"{lost}|\[10\.88\.0\.[12]\]:\d+: Connection reset by peer", error)
        assert since < 10
