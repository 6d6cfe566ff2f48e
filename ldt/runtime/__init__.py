"""Connects ranks and executes plans."""

from ldt.runtime.common.auxiliary_loss import add_loss
from ldt.runtime.common.kept import keep
from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.execution.observer import Observer
from ldt.runtime.execution.profiler import Profile
from ldt.runtime.execution.scalars import scalars
from ldt.runtime.execution.step_result import StepResult, StepStats, Traffic, merge_timelines
from ldt.runtime.mesh.connect import connect
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.pipeline import Pipeline

__all__ = [
    "Mesh",
    "Observer",
    "Pipeline",
    "Profile",
    "StepResult",
    "StepStats",
    "TensorSpec",
    "Traffic",
    "add_loss",
    "connect",
    "keep",
    "merge_timelines",
    "scalars",
]
