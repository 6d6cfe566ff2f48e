"""Skips tests of integrations if the other library is not installed."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_hf_*.py"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread: the models are so small that synchronizing threads takes longer than computing."""
    import torch

    torch.set_num_threads(1)
