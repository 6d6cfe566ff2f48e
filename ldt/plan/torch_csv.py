"""Reads and writes plans as the CSV files of torch.distributed.pipelining: a line of actions for each rank.

Such a file has no topology, number of microbatches or lanes. Its ranks are our stages.
"""

from __future__ import annotations

import re

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.verifier import verify
from ldt.plan.files import check_size, check_text
from ldt.plan.plan import Plan
from ldt.plan.schedules.passes import add_communication, add_grad_reduction
from ldt.topology import LanePolicy, Topology

__all__ = ["check_expressible", "from_csv", "to_csv"]

_SHARDING = ("UNSHARD", "RESHARD")  # of parameters, which the sharding wrapper does itself
_OVERLAPPED = re.compile(
    r"\(([^()]*)\)OVERLAP_F_B"
)  # a forward and a backward, which run one after the other here


def to_csv(plan: Plan, *, communication: bool = False) -> str:
    """Return one line per stage: the row of replica 0, which all replicas have.

    Without ``communication`` the format is torch's "compute_only", with it "compute_comms". Reductions are left out:
    torch places its own. Raises PlanError if an edge replica serves several cloud replicas, since their rows differ.
    """
    check_expressible(plan.topology)
    rows = [row for node, row in plan.rows.items() if node.replica == 0]
    lines = [
        ",".join(str(a) for a in row if a.kind.is_compute or (communication and a.kind.is_comm))
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def from_csv(text: str, topology: Topology, *, lanes: LanePolicy = "dedicated") -> Plan:
    """Return the complete, verified plan with the compute order of ``text``, in either of torch's formats.

    Communication and reductions are placed anew for ``lanes``; UNSHARD and RESHARD are ignored, and the actions of an
    OVERLAP_F_B run in turn. Every replica gets the same rows. A V-shaped schedule (ZBV, DualPipeV) needs a
    ``Topology(placement=...)`` that has its stages, such as [0, 1, 1, 0].

    Raises:
        PlanError: for a cell that is not an action (the error names the line), a number of lines other than that of
            stages, an order that ``verify`` refuses, or an edge replica that serves several cloud replicas.
    """
    check_expressible(topology)
    check_text(text)
    lines = {number: line for number, line in enumerate(text.splitlines(), 1) if line.strip(", \t")}
    if len(lines) != topology.num_stages:
        raise PlanError(
            f"expected a line for each of the {topology.num_stages} stages of {topology.to_text()}, got {len(lines)}"
        )
    by_stage = [_row(line, number) for number, line in lines.items()]
    microbatches = {action.microbatch for row in by_stage for action in row}
    check_size(topology, len(microbatches), len(text) * topology.dp)  # every replica gets the same rows
    training = any(action.kind is not Kind.F for row in by_stage for action in row)
    rows = {node: by_stage[node.stage] for node in topology.nodes}
    plan = add_grad_reduction(Plan(topology, len(microbatches), rows, lanes=None, training=training))
    verify(plan)  # first, because placing communication assumes a valid order
    plan = add_communication(plan, lanes)
    verify(plan)
    return plan


def check_expressible(topology: Topology) -> None:
    """Raise PlanError unless all replicas of a stage have the same row: the file has one row per stage."""
    if topology.served > 1:
        raise PlanError(
            "torch's CSV has one row for all replicas of a stage, but cloud replicas that share an edge have "
            f"different microbatches: expected edge_dp equal to dp, got edge_dp={topology.edge_dp}, dp={topology.dp}; "
            "use Plan.to_text and Plan.from_text"
        )


def _row(line: str, number: int) -> list[Action]:
    cells = (cell.strip().strip('"') for cell in _OVERLAPPED.sub(_in_turn, line).split(","))
    try:
        actions = [Action.parse(cell) for cell in cells if cell and not cell.endswith(_SHARDING)]
    except PlanError as error:
        raise PlanError(f"line {number}: {error}") from error
    return [action for action in actions if action.kind.is_compute]


def _in_turn(overlapped: re.Match[str]) -> str:
    return overlapped[1].replace(";", ",")
