"""Caches the plans of a pipeline by number of microbatches and mode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

from ldt.errors import PlanError
from ldt.plan import Plan, add_communication, add_grad_reduction, ushape, verify
from ldt.topology import LanePolicy, Topology

__all__ = ["PlanCache", "PlanFactory"]

PlanFactory = Callable[[Topology, int, bool], Plan]  # topology, number of microbatches, training


class PlanCache:
    """Complete plans by number of microbatches and mode, each made once. Ranks must have equal plans: see ``digest``.

    A given ``plan`` is the only one for its mode, unless there is a ``factory`` for others. Raises PlanError if a plan
    does not match the mesh's topology or lanes, or the number of microbatches.
    """

    def __init__(
        self, topology: Topology, lanes: LanePolicy, plan: Plan | None, factory: PlanFactory | None
    ) -> None:
        self._topology = topology
        self._lanes: LanePolicy = lanes
        self._factory = factory
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._digests: dict[tuple[int, bool], str] = {}
        self.lockstep: Collection[int] = ()  # stages whose replicas synchronize in every action
        self._given = plan
        if plan is not None:
            self._given = self._completed(plan)
            self._plans[plan.num_microbatches, plan.training] = self._given

    def get(self, num_microbatches: int, training: bool) -> Plan:
        """Return a plan. Raises PlanError if the given plan does not match and there is no factory, or verify fails."""
        key = (num_microbatches, training)
        if key not in self._plans:
            self._plans[key] = self._completed(self._make(num_microbatches, training))
        return self._plans[key]

    def require_lockstep(self, stages: Collection[int]) -> None:
        """Verify all plans, present and future, for replicas of ``stages`` that run in lockstep. Raises PlanError."""
        self.lockstep = stages
        for plan in self._plans.values() if stages else ():
            verify(plan, lockstep=stages)

    def digest(self, num_microbatches: int, training: bool) -> str:
        """Return a short text that is equal on ranks with equal plans."""
        key = (num_microbatches, training)
        if key not in self._digests:
            self._digests[key] = _digest(self.get(num_microbatches, training).to_text())
        return self._digests[key]

    def digest_of_all(self) -> str:
        """Return the digest of all plans given or made so far."""
        return _digest("".join(plan.to_text() for plan in self._plans.values()))

    def _make(self, num_microbatches: int, training: bool) -> Plan:
        given = self._given
        if self._factory is not None:
            plan = self._factory(self._topology, num_microbatches, training)
        elif given is None or given.training != training:
            plan = ushape(self._topology, num_microbatches, training=training, lanes=self._lanes)
        else:
            raise PlanError(
                f"the plan given to Pipeline is for {given.num_microbatches} microbatches, {_mode(training)} got "
                f"{num_microbatches}: for batches of several sizes pass plan_factory=, a function of (topology, "
                "num_microbatches, training) that returns a plan"
            )
        if isinstance(plan, Plan) and (plan.num_microbatches, plan.training) != (num_microbatches, training):
            raise PlanError(
                f"plan_factory must return a plan for {num_microbatches} microbatches of {_mode(training)}, got one "
                f"for {plan.num_microbatches} of {_mode(plan.training)}"
            )
        return plan

    def _completed(self, plan: Plan) -> Plan:
        if not isinstance(plan, Plan):
            raise PlanError(
                f"expected an ldt.plan.Plan, got {type(plan).__name__}: parse a text with Plan.from_text, and return a "
                "Plan from plan_factory"
            )
        if plan.topology != self._topology:
            raise PlanError(
                f"the plan is for topology {plan.topology.to_text()}, the mesh was connected for "
                f"{self._topology.to_text()}: make the plan from mesh.topology"
            )
        if plan.lanes is None:
            plan = add_communication(add_grad_reduction(plan), self._lanes)
        if plan.lanes != self._lanes:
            raise PlanError(
                f"the plan is for {plan.lanes!r} lanes, the mesh was connected with lanes={self._lanes!r}: "
                "use the same for both"
            )
        verify(plan, lockstep=self.lockstep)
        return plan


def _mode(training: bool) -> str:
    return "step()" if training else "eval()"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
