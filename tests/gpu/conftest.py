"""Tests on GPUs have more lanes in a process than a GPU has queues by default; see docs/gpu_notes.md."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
