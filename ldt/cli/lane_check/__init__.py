"""Tests each kind of lane that this machine supports and reports its speed or what is broken.

Used by `python -m ldt doctor` and by the build, which tests its result. Each trial runs in two new processes, so even
a signal that ends them is a finding.
"""

from ldt.cli.lane_check.kinds import HOST, LaneKind, lane_kinds
from ldt.cli.lane_check.trial import Trial, try_lane

__all__ = ["HOST", "LaneKind", "Trial", "lane_kinds", "try_lane"]
