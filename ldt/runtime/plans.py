"""The plans of a pipeline: the given one, and those that other numbers of microbatches or eval need."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from ldt.errors import PlanError
from ldt.plan import Plan, add_communication, add_grad_reduction, ushape, verify
from ldt.runtime.executor import KINDS
from ldt.topology import LanePolicy, Topology

__all__ = ["PlanBook", "PlanFactory"]

logger = logging.getLogger(__name__)

PlanFactory = Callable[[Topology, int, bool], Plan]  # topology, number of microbatches, training


class PlanBook:
    """Complete plans by number of microbatches and mode, made once each. The same on all ranks: see ``digest``.

    Raises PlanError for a plan of another topology or other lanes than the mesh's, or with actions that the runtime
    has no method for.
    """

    def __init__(
        self, topology: Topology, lanes: LanePolicy, plan: Plan | None, factory: PlanFactory | None
    ) -> None:
        self._topology = topology
        self._lanes: LanePolicy = lanes
        self._factory: PlanFactory = factory or self._ushape
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._digests: dict[tuple[int, bool], str] = {}
        self._given = plan
        if plan is not None:
            self._plans[plan.num_microbatches, plan.training] = self._completed(plan)

    def get(self, num_microbatches: int, training: bool) -> Plan:
        key = (num_microbatches, training)
        if key not in self._plans:
            self._note_other(num_microbatches, training)
            self._plans[key] = self._completed(self._factory(self._topology, num_microbatches, training))
        return self._plans[key]

    def digest(self, num_microbatches: int, training: bool) -> str:
        """A short text that is equal on ranks whose plans are."""
        key = (num_microbatches, training)
        if key not in self._digests:
            self._digests[key] = _digest(self.get(num_microbatches, training).to_text())
        return self._digests[key]

    def digest_of_all(self) -> str:
        """As ``digest``, of all plans that were given or made so far."""
        return _digest("".join(plan.to_text() for plan in self._plans.values()))

    def _note_other(self, num_microbatches: int, training: bool) -> None:
        """The caller may think that the plan given runs always. That it does not in eval goes without saying."""
        given = self._given
        if given is None or (given.training and not training):
            return
        logger.info(
            "the plan given to Pipeline is for %d microbatches of %s; %d microbatches of %s run a plan of %s instead",
            given.num_microbatches,
            _mode(given.training),
            num_microbatches,
            _mode(training),
            "ldt.plan.ushape" if self._factory == self._ushape else "plan_factory",
        )

    def _completed(self, plan: Plan) -> Plan:
        if plan.topology != self._topology:
            raise PlanError(
                f"the plan is for topology {plan.topology.to_text()}, the mesh was connected for "
                f"{self._topology.to_text()}: make the plan from mesh.topology"
            )
        if plan.lanes is None:
            plan = add_grad_reduction(add_communication(plan, self._lanes))
        if plan.lanes != self._lanes:
            raise PlanError(
                f"the plan is for {plan.lanes!r} lanes, the mesh was connected with lanes={self._lanes!r}: "
                "use the same for both"
            )
        kinds = {action.kind for row in plan.rows.values() for action in row} - KINDS
        if kinds:
            raise PlanError(
                f"the plan has actions of kind {', '.join(sorted(kinds))}, the runtime runs only "
                f"{', '.join(sorted(KINDS))}: make a plan with full backwards"
            )
        verify(plan)
        return plan

    def _ushape(self, topology: Topology, num_microbatches: int, training: bool) -> Plan:
        return ushape(topology, num_microbatches, training=training, lanes=self._lanes)


def _mode(training: bool) -> str:
    return "step()" if training else "eval()"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
