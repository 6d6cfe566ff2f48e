"""Selects transports, as far as this can be tested without GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ldt
from ldt import _cuda
from ldt._C import IpcPool, IpcSender, LaneError
from ldt.runtime.comm.ipc_links import ipc_links
from ldt.runtime.comm.transfer_modes import Transfers
from ldt.runtime.comm.transports import warn_about_settings
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 2


def refused(transport: Any) -> str:
    with pytest.raises(ValueError, match="transport") as error:
        ldt.connect(Topology([1, 1]), transport=transport)
    return str(error.value)


@pytest.mark.parametrize("transport", ["copy_engine", "host", "nccl"])
def test_transports_of_gpus_need_gpus(pool: RankPool, transport: str) -> None:
    for text in pool.run(refused, transport):
        assert f"transport='{transport}' needs GPUs" in text


def test_an_unknown_transport_is_refused_with_the_known_ones(pool: RankPool) -> None:
    for text in pool.run(refused, "pigeon"):
        assert "'auto', 'copy_engine', 'host', 'nccl', 'c10d', got 'pigeon'" in text


def on_the_cpu() -> set[str]:
    with ldt.connect(Topology([1, 1])) as mesh:
        return {mesh.transport_of(channel) for channel in mesh.endpoints}


def test_on_the_cpu_all_lanes_use_their_groups(pool: RankPool) -> None:
    assert pool.run(on_the_cpu) == [{"c10d"}, {"c10d"}]


def unlike() -> str:
    with pytest.raises(ldt.LdtError) as error:
        ldt.connect(Topology([1, 1]), transport="auto" if dist.get_rank() == 0 else "c10d")
    return str(error.value)


def test_ranks_that_want_different_transports_are_named(pool: RankPool) -> None:
    for text in pool.run(unlike):
        assert "transport must be the same on all ranks" in text


def test_a_device_without_a_copy_engine_says_so() -> None:
    with pytest.raises(LaneError, match=r"no copy engine for devices of type|CUDA|CUresult"):
        IpcPool(torch.device("cuda", 99))
    with pytest.raises(LaneError):
        IpcSender(torch.device("cuda", 99), "not an offer")


def test_links_go_to_each_receiver_and_along_its_stage() -> None:
    topology = Topology([1, 3])
    links = ipc_links(topology, "dedicated", Transfers.of(topology, "leader"))
    pairs = {
        lane[0]: [(link.source, link.target, link.in_stage) for link in found]
        for lane, found in links.items()
    }
    assert [(0, 1, False), (1, 2, True), (2, 3, True)] in pairs.values()
    assert [(1, 0, False)] in pairs.values()
    names = [link.name for found in links.values() for link in found]
    assert len(set(names)) == len(names)


def test_harmful_settings_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    warn_about_settings(torch.device("cuda", 0))
    assert not caplog.records
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    warn_about_settings(torch.device("cuda", 0))
    assert "CUDA_MODULE_LOADING was not EAGER" in caplog.text
    caplog.clear()
    warn_about_settings(torch.device("xpu", 0))
    assert not caplog.records


VARIABLES = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


@pytest.mark.parametrize(("given", "found"), [(None, ["EAGER", "32", "0"]), ("1", ["1", "1", "1"])])
def test_cuda_finds_what_lanes_need_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, found: list[str]
) -> None:
    """``import ldt`` recognizes a machine with a GPU by a file of the driver."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(_cuda, "_DEVICE_FILES", (tmp_path / "none", tmp_path / "driver"))
    monkeypatch.setattr(_cuda, "_has_started", lambda: False)
    monkeypatch.setitem(_cuda._at_import, "queues", 0)
    for name in VARIABLES:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    _cuda.prepare()
    assert [os.environ[name] for name in VARIABLES] == found


def test_the_import_sets_them_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    code = "import os, ldt, ldt.plan, ldt.runtime, ldt.cli, ldt._cuda; "
    code += f"print([name in os.environ for name in {VARIABLES}], any(f.exists() for f in ldt._cuda._DEVICE_FILES))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout in ("[True, True, True] True\n", "[False, False, False] False\n")
