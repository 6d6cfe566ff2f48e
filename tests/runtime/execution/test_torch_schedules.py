"""torch.distributed.pipelining reads the CSV files that we write, and we read those that it writes."""

from __future__ import annotations

import csv
import io

import pytest
from torch.distributed.pipelining import schedules

from ldt.plan import from_csv, remove_communication, to_csv, ushape
from ldt.topology import Topology

WORLD_SIZE = 1


def read(text: str) -> dict[int, list[schedules._Action]]:
    """Parse rank by rank, like ``_PipelineScheduleRuntime._load_csv``."""
    rows = csv.reader(io.StringIO(text))
    return {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize(("stages", "laps"), [(1, 1), (3, 1), (4, 2)])
def test_torch_reads_our_files(stages: int, laps: int) -> None:
    """torch parses the same actions, and adds the same messages."""
    topology = Topology([1] * stages, laps=laps)
    plan = ushape(topology, 5)
    rows = read(to_csv(plan))
    assert [list(map(str, row)) for row in rows.values()] == [
        [str(action) for action in row if action.kind.is_compute] for row in plan.rows.values()
    ]
    lowered = schedules._add_send_recv(rows, topology.stage_of, topology.num_chunks)
    assert {rank: set(map(str, row)) for rank, row in lowered.items()} == {
        node.stage: set(map(str, row)) for node, row in plan.rows.items()
    }
    with_messages = read(to_csv(plan, communication=True))
    assert {rank: list(map(str, row)) for rank, row in with_messages.items()} == {
        node.stage: list(map(str, row)) for node, row in plan.rows.items()
    }


def test_we_read_its_files() -> None:
    """Format a schedule as torch does: idle slots are empty; UNSHARD and REDUCE_GRAD actions surround the rest."""
    order: dict[int, list[schedules._Action | None]] = {}
    for rank, row in read("0F0,,2F0,2I0,2W0,0B0\n,1F0,,,,1B0\n").items():
        order[rank] = [action if str(action) != "None" else None for action in row]
    file = io.StringIO()
    unsharded = {rank: schedules._add_unshard_reshard(row) for rank, row in order.items()}
    csv.writer(file).writerows(schedules._add_send_recv(unsharded, {0: 0, 1: 1, 2: 0}.get, 3).values())
    text = file.getvalue()
    assert "0UNSHARD" in text
    assert "1RECV_F0" in text
    plan = from_csv(text, Topology([1, 1]))
    bare = [",".join(map(str, row)) for row in remove_communication(plan).rows.values()]
    assert bare == ["0F0,2F0,2I0,2W0,0B0", "1F0,1B0"]
