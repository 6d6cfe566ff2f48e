"""Schedules as data: actions, plans and their text form. Pure Python, no torch."""

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.plan import Plan

__all__ = ["Action", "Kind", "Plan", "PlanError"]
