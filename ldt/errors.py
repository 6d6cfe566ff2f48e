"""The exceptions of the package that need neither torch nor the compiled module."""

from __future__ import annotations

__all__ = ["LdtError", "PlanError", "RemoteStageError", "TopologyError"]


class LdtError(Exception):
    """Base of every error the package raises on its own account."""


class TopologyError(LdtError, ValueError):
    """A topology that cannot exist; the text names the number that is wrong."""


class PlanError(LdtError, ValueError):
    """A plan that cannot be built, read or proven; the text shows the place in the grid if there is one."""


class RemoteStageError(LdtError, RuntimeError):
    """Another rank failed first; the text carries which one and its error."""
