"""Tests the link between the two sites of a job. Both sites run it at once, and get the same report.

Used by ``python -m ldt doctor --link``. What the other site says is JSON, checked and limited in size.
"""

from ldt.cli.link_check.check import check_link
from ldt.cli.link_check.report import Report

__all__ = ["Report", "check_link"]
