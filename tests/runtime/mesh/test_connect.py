"""connect(): positions of ranks, late and missing ranks, ranks with different arguments, several meshes."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_jobs import build, step_and_compare
from torch.distributed import distributed_c10d as c10d

import ldt
from ldt.runtime.comm.group_layout import group_specs
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.comm.preconnect import await_connected
from ldt.runtime.comm.transfer_modes import Transfers
from ldt.runtime.health.watchdog import FailureReport, Watchdog
from ldt.testing import RankPool, in_time, paced, toy_chunks, toy_microbatches
from ldt.topology import Topology, lanes

WORLD_SIZE = 4


def positions(policy: Any) -> tuple[Any, ...]:
    topology = Topology([1, 2, 1])
    with ldt.connect(topology, lanes=policy) as mesh:
        assert mesh.device == torch.device("cpu")
        assert [mesh.topology, mesh.lanes, mesh.ranks] == [topology, policy, (0, 1, 2, 3)]
        assert mesh.tp_mesh.size() == topology.tp[mesh.stage]
        assert mesh.tp_mesh.get_local_rank() == mesh.tp_rank
        assert [name[:2] for name in mesh.tp_mesh.mesh_dim_names or ()] == ["tp"], (
            "and the number of the mesh"
        )
        assert mesh.dp_mesh.size() == 1
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mesh.tp_mesh.get_group())
        assert ones.item() == topology.tp[mesh.stage]
        keys = lanes(topology, policy)
        for channel, end in mesh.endpoints.items():
            assert mesh.lane_for(channel) is end.lane
            assert end.lane.name.endswith(str(keys[channel]))
        return (*mesh.node, mesh.tp_rank, mesh.is_leader, len(mesh.endpoints))


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
def test_every_rank_knows_its_position(pool: RankPool, policy: str) -> None:
    assert pool.run(positions, policy) == [
        (0, 0, 0, True, 4),
        (1, 0, 0, True, 4),
        (1, 0, 1, False, 2),
        (2, 0, 0, True, 4),
    ]


def sums(tp: list[int], dp: int) -> list[float]:
    with ldt.connect(Topology(tp, dp=dp), ranks=range(sum(tp) * dp)) as mesh:
        return mesh.control.sum([2.0**mesh.rank, 1.0])


@pytest.mark.parametrize(("tp", "dp"), [([1], 1), ([1, 1], 1), ([2, 2], 1), ([4], 1), ([1, 1], 2), ([2], 2)])
def test_sums_count_every_rank_once(pool: RankPool, tp: list[int], dp: int) -> None:
    size = sum(tp) * dp
    assert pool.run(sums, tp, dp, ranks=range(size)) == [[2.0**size - 1, size]] * size


def closed_lane() -> str:
    topology = Topology([1, 1])
    with ldt.connect(topology, ranks=[0, 1]) as mesh:
        lane = mesh.lane_for(topology.channels[0])
    with pytest.raises(ldt.LaneError) as caught:
        lane.send([torch.ones(1)], 1) if mesh.is_edge else lane.recv([torch.ones(1)], 0)
    return str(caught.value)


def test_closing_a_mesh_closes_its_lanes(pool: RankPool) -> None:
    """Also for code that kept a reference to one."""
    assert all("is closed" in text for text in pool.run(closed_lane, ranks=[0, 1]))


def with_device(device: str) -> str:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology)
    with ldt.connect(topology, ranks=[0, 1], device=device) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))
        return str(mesh.device)


def test_the_cpu_has_no_index(pool: RankPool) -> None:
    assert pool.run(with_device, "cpu:0", ranks=[0, 1]) == ["cpu"] * 2


def connected_groups() -> list[str]:
    """Return the names of the groups that ran an all-reduce while connecting."""
    topology = Topology([2], dp=2)
    names = []
    reduce = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:

        def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
            names.append(group.group_name.split("/", 3)[-1])
            return reduce(tensor, group=group, async_op=async_op)

        patch.setattr(dist, "all_reduce", all_reduce)
        ldt.connect(topology).close()
    return names


def test_the_groups_of_layers_and_replicas_are_connected(pool: RankPool) -> None:
    assert pool.run(connected_groups) == [
        ["tp/0.0", "dp/0.0"],
        ["tp/0.0", "dp/0.1"],
        ["tp/0.1", "dp/0.0"],
        ["tp/0.1", "dp/0.1"],
    ]


class Works:
    """A work of a device with streams: ``wait`` returns at once."""

    def __init__(self, done_after: float) -> None:
        self.end = time.monotonic() + done_after
        self.waited = False

    def is_completed(self) -> bool:
        return time.monotonic() > self.end

    def wait(self) -> None:
        self.waited = True


def test_connecting_ends_at_the_deadline() -> None:
    watch: Any = Watchdog(dist.HashStore(), "failure", lambda report: None)
    soon: Any = Works(0.05)
    await_connected(soon, "channel F0:0.0->1.0", watch, time.monotonic() + 10)
    assert soon.waited
    start = time.monotonic()
    never: Any = Works(60)
    with pytest.raises(ldt.LdtError, match=r"channel F0:0\.0->1\.0 was not connected in time"):
        await_connected(never, "channel F0:0.0->1.0", watch, time.monotonic() + 0.2)
    watch.publish(FailureReport(3, 1, 0, "connect", "no more sockets"))
    with pytest.raises(ldt.RemoteStageError, match="rank 3"):
        await_connected(never, "channel F0:0.0->1.0", watch, time.monotonic() + 10)
    assert in_time(time.monotonic() - start, 5)
    watch.close()


class Group:
    """A process group of some backend that records the calls made on it."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.calls: list[Any] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def abort(self) -> None:
        self.calls.append("break")


@pytest.fixture
def fake_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[Any, Any] = {}

    def make(size: int, rank: int, ranks: Any, backend: str, *rest: Any, **options: Any) -> Any:
        group = Group(backend)
        made[group] = None
        return group, None

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: None)
    monkeypatch.setattr(c10d, "_abort_process_group", lambda group: group.calls.append("abort"))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: group.calls.append("destroy"))
    monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda world: made), raising=True)
    monkeypatch.setattr(type(c10d._world), "pg_group_ranks", property(lambda world: {}))


@pytest.mark.usefixtures("fake_groups")
@pytest.mark.parametrize("broken", [False, True])
def test_groups_of_backends_with_streams(broken: bool) -> None:
    """They keep their timeout, and are aborted after a failure: destroying would flush them."""
    minute = timedelta(minutes=1)
    groups = GroupSet()
    gloo: Any = groups.make("control", "mesh/control", [0, 1], "gloo", minute)
    nccl: Any = groups.make("lane/F0", "mesh/lane/F0", [0, 1], "nccl", minute)
    assert gloo.calls == [timedelta(days=30)]
    assert nccl.calls == []
    if broken:
        groups.break_all()
    groups.destroy()
    assert gloo.calls[1:] == ["destroy"]
    assert nccl.calls == (["break", "abort"] if broken else ["destroy"])
    assert not groups


def two_pipelines() -> list[int]:
    """The orders of ranks also differ."""
    mine = [3, 1] if dist.get_rank() in (1, 3) else [0, 2]
    topology = Topology([1, 1])
    chunks = toy_chunks(topology, seed=mine[0])
    with ldt.connect(topology, ranks=mine) as mesh:
        assert mesh.ranks[mesh.rank] == dist.get_rank()
        pipeline = build(mesh, chunks)
        for number in (3, 1):
            step_and_compare(mesh, pipeline, chunks, toy_microbatches(number, seed=mine[0]))
        return [mesh.rank, mesh.stage]


def test_two_pipelines_in_one_world(pool: RankPool) -> None:
    assert pool.run(two_pipelines) == [[0, 0], [1, 1], [1, 1], [0, 0]]


def three_meshes_at_once() -> None:
    """Meshes over the same and over overlapping ranks, used in turn."""
    topologies = [Topology([1, 1, 1, 1]), Topology([1, 2, 1]), Topology([1, 1, 1, 1])]
    meshes = [ldt.connect(topology, lanes="paired") for topology in topologies]
    for mesh in meshes:
        chunks = toy_chunks(mesh.topology)
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(3))
    for mesh in meshes:
        mesh.close()
        mesh.close()
        with pytest.raises(ldt.LdtError, match="closed"):
            mesh.check_usable()


def test_several_meshes_over_the_same_ranks(pool: RankPool) -> None:
    pool.run(three_meshes_at_once)


def late() -> None:
    time.sleep(0.3 * dist.get_rank())
    topology = Topology([1, 1, 1, 1])
    with ldt.connect(topology, timeout=paced(20)) as mesh:
        chunks = toy_chunks(topology)
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(2))


def test_late_ranks(pool: RankPool) -> None:
    pool.run(late)


def missing(topology: Topology, absent: list[int]) -> tuple[str, str, float]:
    """All but ``absent`` connect; those connect after the others have raised. Then all connect again."""
    start = time.monotonic()
    if dist.get_rank() in absent:
        time.sleep(2.5 * paced(1).total_seconds())
    with pytest.raises(ldt.LdtError) as caught:
        ldt.connect(topology, timeout=paced(1))
    seconds = time.monotonic() - start
    ldt.connect(topology).close()
    return type(caught.value).__name__, str(caught.value), seconds


@pytest.mark.parametrize("absent", [[2], [0, 3]])
def test_missing_ranks_are_named(pool: RankPool, absent: list[int]) -> None:
    answers = pool.run(missing, Topology([1, 1, 1, 1]), absent)
    for rank, (kind, text, seconds) in enumerate(answers):
        assert kind == "LdtError"
        assert f"{', '.join(map(str, absent))} of [0, 1, 2, 3] did not come" in text, text
        assert "the others gave up" in text
        assert rank in absent or in_time(seconds, 2.4)


def failing_arguments(arguments: list[tuple[Any, dict[str, Any]]]) -> str:
    topology, options = arguments[dist.get_rank()]
    with pytest.raises((ValueError, ldt.LdtError)) as caught:
        ldt.connect(topology, timeout=paced(10), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("topology", "options", "text"),
    [
        (Topology([1, 1]), {}, "needs 2 ranks, but WORLD_SIZE is 4: start as many processes"),
        (Topology([1, 4]), {}, "needs 5 ranks, but WORLD_SIZE is 4"),
        (Topology([1, 1]), {"ranks": [0, 0]}, "needs 2 different ranks of 0 to 3, got ranks=[0, 0]"),
        (Topology([1, 1]), {"ranks": [0, 4]}, "got ranks=[0, 4]"),
        (Topology([1, 1]), {"ranks": [0, 1, 2]}, "got ranks=[0, 1, 2]"),
        (
            Topology([1, 1, 1, 1]),
            {"lanes": "pair"},
            "lane policy must be 'dedicated' or 'paired', got 'pair'",
        ),
    ],
)
def test_invalid_arguments(pool: RankPool, topology: Topology, options: dict[str, Any], text: str) -> None:
    assert all(text in answer for answer in pool.run(failing_arguments, [(topology, options)] * 4))


def test_ranks_with_different_arguments_are_named(pool: RankPool) -> None:
    four = Topology([1, 1, 1, 1])
    answers = pool.run(failing_arguments, [(four, {})] * 3 + [(Topology([1, 1, 2]), {})])
    assert "topology must be the same on all ranks" in answers[0]
    assert "rank 3 has 'tp=1,1,2 dp=1 edge_dp=1 laps=1'" in answers[0]
    assert "rank 0 has 'tp=1,1,1,1 dp=1 edge_dp=1 laps=1'" in answers[3]
    answers = pool.run(failing_arguments, [(four, {})] * 3 + [(four, {"lanes": "paired"})])
    assert all("lanes must be the same on all ranks" in answer for answer in answers)


def outsider() -> str:
    if dist.get_rank() < 2:
        ldt.connect(Topology([1, 1]), ranks=[0, 1]).close()
        return ""
    with pytest.raises(ValueError, match="only those may call this connect") as caught:
        ldt.connect(Topology([1, 1]), ranks=[0, 1])
    return str(caught.value)


def test_a_rank_outside_the_mesh_is_refused(pool: RankPool) -> None:
    assert "rank 2 is not one of ranks=[0, 1]" in pool.run(outsider)[2]


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    topology = Topology([1], laps=2)
    chunks = toy_chunks(topology)
    with ldt.connect(topology) as mesh:
        step_and_compare(mesh, build(mesh, chunks), chunks, toy_microbatches(3))
        with pytest.raises(ldt.LdtError, match="init_process_group"):
            _ = mesh.tp_mesh
    with pytest.raises(ValueError, match="init_process_group first"):
        ldt.connect(Topology([1, 1]))


@pytest.mark.parametrize("policy", ["dedicated", "paired"])
@pytest.mark.parametrize("tp", [[1], [1, 1], [1, 2, 1], [2, 2, 2, 2]])
@pytest.mark.parametrize("dp", [1, 2])
def test_groups(tp: list[int], dp: int, policy: Any) -> None:
    """Names are unique, members sorted, and the stage groups of a lane start with the leader."""
    topology = Topology(tp, dp=dp)
    specs = group_specs(topology, policy, Transfers.of(topology, "leader"))
    assert len({spec.name for spec in specs}) == len(specs)
    for name, ranks in specs:
        assert len(ranks) > 1
        assert sorted(set(ranks)) == list(ranks)
        if "/stage/" in name:
            assert topology.tp_rank_of(ranks[0]) == 0
    points = [spec for spec in specs if spec.name.startswith("lane/") and "/stage/" not in spec.name]
    assert {spec.name for spec in points} == {f"lane/{key}" for key in lanes(topology, policy).values()}
    if policy == "dedicated":
        assert all(len(spec.ranks) == 2 for spec in points)


def seconds_to_connect(
    rank: int, folder: str, places: list[Any], address: str, tp: list[int], transfer: Any
) -> None:
    places[rank].enter()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=len(places), timeout=paced(60)
    )
    dist.barrier()
    start = time.monotonic()
    with ldt.connect(Topology(tp), transfer=transfer):
        (Path(folder) / str(rank)).write_text(str(time.monotonic() - start))
        dist.barrier()


@pytest.mark.usefixtures("wide_area")
@pytest.mark.parametrize(
    ("tp", "transfer", "round_trips"),
    [([1, 1, 1], "leader", 30), pytest.param([4, 4], "auto", 100, marks=pytest.mark.slow)],
)
def test_connecting_takes_few_round_trips(
    tmp_path: Path, tp: list[int], transfer: str, round_trips: int
) -> None:
    """About 16, whatever the number of groups; "auto" sends some 4 MiB to measure."""
    from wan_link import ADDRESSES, Settings, wide_area_link

    with wide_area_link(Settings(12.5e6, 0.05)) as link:
        places = [link.places[0]] * tp[0] + [link.places[1]] * sum(tp[1:])
        inputs = (str(tmp_path), places, ADDRESSES[0], tp, transfer)
        torch.multiprocessing.start_processes(
            seconds_to_connect, inputs, nprocs=len(places), start_method="spawn"
        )
    for rank in range(len(places)):
        assert in_time(float((tmp_path / str(rank)).read_text()), round_trips * 0.1)
