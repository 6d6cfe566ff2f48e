"""Which device a rank of an example takes, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(autouse=True)
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of local rank 0 of 3, and forget what a test sets."""
    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_HOSTID", "")


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have PyTorch report GPUs. Returns the devices that become current."""
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("gpus", "wanted", "rank", "device", "host"),
    [
        (4, "auto", 2, "cuda:2", ""),
        (3, "cuda", 1, "cuda:1", ""),
        (2, "auto", 1, "cuda:1", " 0"),
        (2, "cuda", 2, "cuda:0", " 1"),
        (1, "auto", 2, "cuda:0", " 2"),
        (0, "auto", 2, "cpu", ""),
        (4, "cpu", 2, "cpu", ""),
    ],
)
def test_device_of_a_rank(
    gpus: int, wanted: str, rank: int, device: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from text.device import select_device

    monkeypatch.setenv("LOCAL_RANK", str(rank))
    current = with_gpus(gpus, monkeypatch)
    selected = select_device(wanted)
    assert selected.device == torch.device(device)
    assert selected.backends == ("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    assert current == [torch.device(device)] * (device != "cpu")
    assert os.environ["NCCL_HOSTID"].endswith(host)
    assert bool(os.environ["NCCL_HOSTID"]) == bool(host), "only ranks that share a GPU say another host"


@pytest.mark.parametrize(
    ("gpus", "wanted", "sentence"),
    [
        (4, "auto", "runs on GPUs, one for each rank: this host has 4"),
        (2, "cuda", "runs on GPUs, which ranks share and so take turns: this host has 2 for 3 ranks"),
        (0, "auto", f"runs on the CPU: PyTorch {torch.__version__} sees no GPU or NPU"),
        (4, "cpu", "runs on the CPU: --device cpu"),
    ],
)
def test_the_first_rank_of_a_host_says_it(
    gpus: int, wanted: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from text.device import select_device

    with_gpus(gpus, monkeypatch)
    select_device(wanted)
    assert capsys.readouterr().out == f"{sentence}\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    select_device(wanted)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("wanted", "advice"),
    [
        ("cuda", "sees no GPU: install a build for CUDA and a driver, check CUDA_VISIBLE_DEVICES"),
        ("npu", "sees no NPU: install torch_npu and a driver, check ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_a_device_that_is_missing_is_refused(
    wanted: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from text.device import select_device

    with_gpus(0, monkeypatch)
    with pytest.raises(ValueError, match=rf"--device {wanted}: PyTorch .* {advice}, or give --device cpu"):
        select_device(wanted)
