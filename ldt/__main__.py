"""``python -m ldt``."""

from __future__ import annotations

import sys

from ldt.cli import main

sys.exit(main())
