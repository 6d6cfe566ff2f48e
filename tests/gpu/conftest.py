"""Requests more hardware queues than the default: these tests have more lanes per process. See docs/gpu_notes.md."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
