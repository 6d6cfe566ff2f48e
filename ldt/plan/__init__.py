"""Schedules as data: generate, verify, simulate and draw them. Pure Python, no torch."""

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.verifier import verify
from ldt.plan.costs import Costs
from ldt.plan.plan import Plan
from ldt.plan.planner.lower_bound import lower_bound
from ldt.plan.planner.optimizer import optimize
from ldt.plan.plots.figure import draw
from ldt.plan.plots.text import draw_text
from ldt.plan.plots.trace import chrome_trace, read_trace
from ldt.plan.schedules.passes import (
    add_communication,
    add_grad_reduction,
    buffers_needed,
    remove_communication,
)
from ldt.plan.schedules.u_shape import ushape
from ldt.plan.sim.critical_path import critical_path
from ldt.plan.simulator import simulate
from ldt.plan.timeline import Event, Timeline
from ldt.plan.torch_csv import from_csv, to_csv

__all__ = [
    "Action",
    "Costs",
    "Event",
    "Kind",
    "Plan",
    "PlanError",
    "Timeline",
    "add_communication",
    "add_grad_reduction",
    "buffers_needed",
    "chrome_trace",
    "critical_path",
    "draw",
    "draw_text",
    "from_csv",
    "lower_bound",
    "optimize",
    "read_trace",
    "remove_communication",
    "simulate",
    "to_csv",
    "ushape",
    "verify",
]
