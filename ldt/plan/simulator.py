"""Simulates a plan under given costs."""

from __future__ import annotations

from ldt.plan.action import Action
from ldt.plan.checks.verifier import prove
from ldt.plan.costs import Costs
from ldt.plan.message import Message
from ldt.plan.plan import Plan
from ldt.plan.sim.engine import Run
from ldt.plan.timeline import Event, Timeline

__all__ = ["simulate"]


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Return the timeline of ``plan`` under ``costs``, by the rules of ``ldt.plan.sim.engine``.

    Raises PlanError if the plan is invalid or the costs do not fit it.
    """
    costs.check(plan.topology)
    return timeline_of(plan, prove(plan, costs, plan.lanes))


def timeline_of(plan: Plan, run: Run) -> Timeline:
    """The events of ``run`` as a timeline."""
    events = [Event(*computed) for computed in run.computed]
    events += [_transfer(message, start, end) for message, start, end in run.transferred]
    return Timeline.of(plan.topology, events)


def _transfer(message: Message, start: float, end: float) -> Event:
    channel, microbatch = message
    send = Action.send_of(channel.hop, channel.direction, microbatch)
    return Event(channel.source, send, start, end, channel)
