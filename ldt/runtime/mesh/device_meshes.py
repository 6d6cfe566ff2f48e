"""Creates the DeviceMeshes of a stage from its process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ldt.errors import LdtError
from ldt.runtime.comm import group_layout as naming
from ldt.runtime.comm.group_set import GroupSet
from ldt.runtime.common.device import choose_backend
from ldt.runtime.common.rank_info import RankInfo
from ldt.topology import Node

__all__ = ["DeviceMeshes"]


class DeviceMeshes:
    """The "dp" and "tp" dimensions of this rank's stage: its replicas by the ranks of each. Created on first use.

    ``key`` is the name of the mesh in the store; ``backend`` is that of the groups, None for the default.
    """

    def __init__(
        self, rank_info: RankInfo, groups: GroupSet, key: str, device: torch.device, backend: str | None
    ) -> None:
        self._rank_info = rank_info
        self._groups = groups
        self._key = key
        self._device = device
        self._backend = backend
        self._parts: dict[str, DeviceMesh] = {}

    def part(self, dim: str) -> DeviceMesh:
        """The one-dimensional DeviceMesh of ``dim``, "dp" or "tp"."""
        if dim not in self._parts:
            info = self._rank_info
            names = (naming.dp_name(info.stage, info.tp_rank), naming.tp_name(*info.node))
            replicas = range(info.topology.replicas(info.stage))
            nodes = (info.topology.ranks_of(Node(info.stage, replica)) for replica in replicas)
            stage = DeviceMesh.from_group(
                [self._group(name) for name in names],
                self._device.type,
                mesh=[[info.ranks[rank] for rank in node] for node in nodes],
                mesh_dim_names=naming.unique_dims(),
            )
            dims = stage.mesh_dim_names
            assert dims is not None
            self._parts = {"dp": stage[dims[0]], "tp": stage[dims[1]]}
        return self._parts[dim]

    def clear(self) -> None:
        """Drop them, and with them their groups."""
        self._parts.clear()

    def _group(self, name: str) -> dist.ProcessGroup:
        """The group of ``group_specs``; a group of this rank alone is created now."""
        if name not in self._groups:
            if not dist.is_initialized():
                raise LdtError("a DeviceMesh needs torch.distributed.init_process_group, also for one rank")
            backend = choose_backend(self._device, self._backend)
            rank = self._rank_info.global_rank
            self._groups.make(name, f"{self._key}/{name}/{rank}", [rank], backend, timedelta(seconds=60))
        return self._groups[name]
