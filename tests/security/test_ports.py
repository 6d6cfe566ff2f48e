"""Once connected, ldt listens nowhere: each listening socket belongs to a gloo group of torch and is closed with it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from listening import listeners
from torch.distributed import distributed_c10d as c10d

import ldt
from ldt.runtime.comm.transfer_modes import TransferChoice
from ldt.testing import RankPool, paced, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import LanePolicy, Topology

WORLD_SIZE = 3
ROOT = Path(ldt.__file__).parents[1]


def gloo_groups() -> int:
    return sum(backend == "gloo" for backend, _ in c10d._world.pg_map.values())


def what_listens(
    policy: LanePolicy, transfer: TransferChoice, connections: int | None
) -> list[tuple[int, int]]:
    """Count listening sockets and gloo groups: initially, with one more group, with a mesh, and after it."""
    seen = [(len(listeners()), gloo_groups())]
    group = dist.new_group(backend="gloo")
    seen.append((len(listeners()), gloo_groups()))
    dist.destroy_process_group(group)
    del group  # whose sockets live as long as the group
    topology = Topology([1, 2])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, lanes=policy, transfer=transfer, connections=connections) as mesh:
        connected = listeners()
        seen.append((len(connected), gloo_groups()))
        mine = [chunks[index] for index in topology.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        pipeline.step(toy_microbatches(2) if mesh.is_edge else None)
        assert listeners() == connected, "a step opens nothing"
    deadline = time.monotonic() + paced(5.0).total_seconds()
    while len(listeners()) > gloo_groups() and time.monotonic() < deadline:
        time.sleep(0.05)  # references to a group are released in the background
    seen.append((len(listeners()), gloo_groups()))
    return seen


@pytest.mark.parametrize(
    ("policy", "transfer", "connections"),
    [("dedicated", "auto", None), ("paired", "leader", None), ("dedicated", "leader", 2)],
)
def test_only_groups_of_torch_listen(
    pool: RankPool, policy: LanePolicy, transfer: TransferChoice, connections: int | None
) -> None:
    for seen in pool.run(what_listens, policy, transfer, connections, timeout=90.0):
        at_first, one_more, connected, closed = seen
        assert (at_first, one_more) == ((1, 1), (2, 2)), "a gloo group has one listening socket"
        sockets, groups = connected
        assert sockets == groups > 3, "each belongs to a group"
        assert closed == (1, 1), "and is closed with it"


def test_the_extension_opens_no_socket() -> None:
    calls = re.compile(r"\b(?:socket|connect|bind|listen|accept4?)\s*\(|<netinet/")
    for source in sorted((ROOT / "csrc").rglob("*")):
        if source.is_file():
            code = re.sub(r"//.*", "", source.read_text(encoding="utf-8"))
            assert not calls.search(code), f"{source.name} has {calls.search(code)}"
