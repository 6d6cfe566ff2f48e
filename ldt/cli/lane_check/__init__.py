"""Makes each kind of lane that this machine has, moves bytes through it, and says how fast, or what is broken.

For `python -m ldt doctor` and for the build, which tries what it has linked. Each trial has two processes of its own:
what ends them, a signal, too, is a finding.
"""

from ldt.cli.lane_check.kinds import HOST, LaneKind, lane_kinds
from ldt.cli.lane_check.trial import Trial, try_lane

__all__ = ["HOST", "LaneKind", "Trial", "lane_kinds", "try_lane"]
