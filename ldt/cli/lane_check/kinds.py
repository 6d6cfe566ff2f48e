"""The kinds of lanes that a machine supports."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["HOST", "LaneKind", "lane_kinds"]


class LaneKind(NamedTuple):
    """A transport on a device, and the remedy if it is broken. ``environment`` is for each of two ranks."""

    name: str
    device: str
    transport: str
    backend: str
    remedy: str
    environment: tuple[dict[str, str], dict[str, str]] = ({}, {})


_GLOO = "set GLOO_SOCKET_IFNAME to a network interface of this machine (such as lo or eth0)"
_NCCL = "run again with NCCL_DEBUG=INFO, which says more, and try NCCL_SOCKET_IFNAME=lo"
_COPY_ENGINE = "use connect(transport='nccl') until it is repaired"
_HCCL = "source the CANN environment for torch_npu, and set HCCL_SOCKET_IFNAME"

HOST = LaneKind("host", "cpu", "c10d", "gloo", _GLOO)
_ON_GPUS = (
    LaneKind("c10d", "cuda", "c10d", "cpu:gloo,cuda:nccl", _NCCL),
    LaneKind("nccl", "cuda", "nccl", "cpu:gloo,cuda:nccl", _NCCL),
    LaneKind("copy engine", "cuda", "copy_engine", "cpu:gloo,cuda:nccl", _COPY_ENGINE),
)
_ON_NPUS = (LaneKind("c10d", "npu", "c10d", "cpu:gloo,npu:hccl", _HCCL),)
# NCCL refuses two ranks of one host on one GPU, so they claim to be on two hosts.
_TWO_HOSTS = ({"NCCL_HOSTID": "ldt-0"}, {"NCCL_HOSTID": "ldt-1"})


def lane_kinds(torch: Any) -> list[LaneKind]:
    """Return the kinds of this machine, the host's first. Two ranks share a GPU if there is only one."""
    kinds = [HOST]
    gpus = torch.cuda.device_count()
    if gpus and torch.distributed.is_nccl_available():
        kinds += [kind._replace(environment=_TWO_HOSTS) if gpus == 1 else kind for kind in _ON_GPUS]
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.device_count() > 1:
        kinds += _ON_NPUS
    return kinds
