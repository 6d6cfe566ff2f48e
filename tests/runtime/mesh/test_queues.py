"""Hardware queues of CUDA: ldt requests them on import, and connect refuses lanes that would share one."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ldt
from ldt import _cuda
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.transfer_modes import TransferChoice, Transfers
from ldt.runtime.comm.transports import TransportChoice, TransportSelector
from ldt.runtime.mesh import rendezvous
from ldt.topology import LanePolicy, Topology

QUEUES = _cuda.QUEUES_VARIABLE


@pytest.mark.parametrize(
    ("started", "at_import", "now", "expected"),
    [
        (False, None, None, 32),
        (True, None, None, 8),  # the default, and too late to request more
        (True, "16", "32", 16),
        (False, "1", "1", 1),
        (False, None, "1", 1),  # changed since, perhaps before CUDA started
        (False, "many", None, 8),
        (False, "64", "64", 32),
        (False, "0", "0", 1),
    ],
)
def test_the_least_possible_number_counts(
    monkeypatch: pytest.MonkeyPatch, started: bool, at_import: str | None, now: str | None, expected: int
) -> None:
    monkeypatch.setattr(_cuda, "_has_started", lambda: started)
    monkeypatch.setattr(_cuda, "_DEVICE_FILES", [Path(__file__)])  # as on a machine with a GPU
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    monkeypatch.setitem(_cuda._at_import, "queues", 0)
    monkeypatch.delenv(QUEUES, raising=False)
    if at_import is not None:
        monkeypatch.setenv(QUEUES, at_import)
    _cuda.prepare()
    if now is not None:
        monkeypatch.setenv(QUEUES, now)
    assert _cuda.queues() == expected


class CheckPassedError(Exception):
    """Raised after the check passed."""


def choose(
    topology: Topology,
    transport: TransportChoice,
    transfer: TransferChoice = "leader",
    policy: LanePolicy = "dedicated",
    others: str = "",
) -> None:
    """Run the check of queues on rank 0 of a mesh on GPUs, where rank 1 reports ``others``."""
    store = dist.HashStore()
    store.set("queues/1", json.dumps({"short": others} if others else {}))

    def share(name: str, value: Any) -> list[Any]:
        if name != "queues":
            raise CheckPassedError
        nobody_fails: Any = None
        return rendezvous.share(store, name, 0, [0, 1], value, nobody_fails, time.monotonic() + 60.0)

    transfers, device = Transfers.of(topology, transfer), torch.device("cuda", 0)
    TransportSelector(transport, LaneLayout(topology, policy, transfers, 0, {}, device), share).select()


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(_cuda._at_import, "queues", 32)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    return monkeypatch


@pytest.mark.parametrize("transport", ["auto", "copy_engine", "nccl", "c10d"])
def test_one_queue_is_refused_over_every_transport(
    queues: pytest.MonkeyPatch, transport: TransportChoice
) -> None:
    queues.setenv(QUEUES, "1")
    with pytest.raises(ldt.LdtError, match=f"restart it with {QUEUES} unset or set to 5 to 32") as error:
        choose(Topology([1, 1]), transport)
    assert "needs 5 hardware queues" in str(error.value)
    assert f"{QUEUES} gives it 1: " in str(error.value)
    assert "Megatron-LM asks for 1" in str(error.value)


@pytest.mark.parametrize(
    ("topology", "options", "needed"),
    [
        (Topology([1, 1]), {}, 5),
        (Topology([1, 1], laps=2), {}, 9),
        (Topology([1, 1], laps=2), {"policy": "paired"}, 3),
        (Topology([2, 1]), {}, 7),  # two channels leave the edge
        (Topology([2, 2]), {"transfer": "scatter"}, 9),
        (Topology([1]), {}, 1),
    ],
    ids=str,
)
def test_each_lane_needs_a_queue_and_so_does_compute(
    queues: pytest.MonkeyPatch, topology: Topology, options: dict[str, Any], needed: int
) -> None:
    queues.setenv(QUEUES, str(needed))
    with contextlib.suppress(CheckPassedError):
        choose(topology, "nccl", **options)
    if needed == 1:
        return  # no peers
    queues.setenv(QUEUES, str(needed - 1))
    with pytest.raises(ldt.LdtError, match=f"restart it with {QUEUES} unset or set to {needed} to 32"):
        choose(topology, "nccl", **options)


def test_more_queues_than_cuda_has_are_not_suggested(queues: pytest.MonkeyPatch) -> None:
    queues.setenv(QUEUES, "32")
    with pytest.raises(ldt.LdtError, match="CUDA has at most 32: use transfer='leader'"):
        choose(Topology([8, 8], laps=2), "auto", "scatter")


def test_all_ranks_raise_if_one_has_too_few(queues: pytest.MonkeyPatch) -> None:
    queues.setenv(QUEUES, "32")
    with pytest.raises(ldt.LdtError, match=r"connect: rank 1 has few\. "):
        choose(Topology([1, 1]), "auto", others="rank 1 has few")
