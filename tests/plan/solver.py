"""The shortest step by a constraint solver, for small jobs in whole numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from ldt.plan import Costs
from ldt.plan.planner.replica_costs import ReplicaCosts
from ldt.topology import Node, Topology


def solved(topology: Topology, microbatches: int, costs: Costs, seconds: float) -> tuple[float, float]:
    """(least possible, found) makespan. Compute times are those of replica 0."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    replica_costs = ReplicaCosts.of(topology, costs)
    over = [*replica_costs.forwards_over, *replica_costs.backwards_over]
    work = sum(replica_costs.forward) + sum(replica_costs.backward) + sum(over)
    horizon = int(microbatches * topology.edge_dp * work + 2 * sum(replica_costs.latency))
    machines: dict[object, list[Any]] = defaultdict(list)  # what runs on a node or goes over a pipe

    def task(machine: object, duration: float) -> Any:
        start = model.new_int_var(0, horizon, "")
        if duration:
            machines[machine].append(model.new_fixed_size_interval_var(start, int(duration), ""))
        return start

    def message(hop: int, direction: Any, replica: int, sent: Any, used: Any) -> Any:
        channel = topology.channel(hop, direction, replica)
        occupancy = int((over[: topology.tail] if direction == "F" else over[topology.tail :])[hop])
        start = task(topology.pipe_of(channel), occupancy)
        model.add(start >= sent)
        model.add(used >= start + occupancy + int(replica_costs.latency[hop]))
        return start

    chunks, end = range(topology.num_chunks), model.new_int_var(0, horizon, "")
    before: dict[int, list[Any]] = {}
    for edge, microbatch in ((edge, m) for edge in range(topology.edge_dp) for m in range(microbatches)):
        replica = topology.cloud_replica(Node(0, edge), microbatch)
        forward = [task(topology.node_at(c, replica), replica_costs.forward[c]) for c in chunks]
        backward = [task(topology.node_at(c, replica), replica_costs.backward[c]) for c in chunks]
        ends = [start + int(time) for start, time in zip(forward, replica_costs.forward, strict=True)]
        ends_back = [start + int(time) for start, time in zip(backward, replica_costs.backward, strict=True)]
        messages = []
        for hop in range(topology.tail):
            messages.append(message(hop, "F", replica, ends[hop], forward[hop + 1]))
            messages.append(message(hop, "B", replica, ends_back[hop + 1], backward[hop]))
        model.add(backward[-1] >= ends[-1])
        model.add(end >= ends_back[0])
        starts = forward + backward + messages
        for earlier, later in zip(before.get(replica, []), starts, strict=False):
            model.add(earlier <= later)  # microbatches of one replica are alike
        before[replica] = starts
    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.best_objective_bound, solver.objective_value
