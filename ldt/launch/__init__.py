"""One description of a job on two sites: starts the ranks of a site, and tells a rank what the description says.

``python -m ldt launch`` starts the ranks; in their script, ``ldt.Job`` reads the description.
"""

from __future__ import annotations

from ldt.launch.job import Job

__all__ = ["Job"]
