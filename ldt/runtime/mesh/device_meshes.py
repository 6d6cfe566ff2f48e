"""torch's own device meshes of a stage, over the groups of its ranks."""

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
    """Those of this rank's stage: its replicas, "dp", by the ranks of each, "tp". Made when first asked for.

    ``key`` is the name of the mesh in the store; ``backend`` that of the groups, None for the default one.
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
        """A dimension of the device mesh of the stage."""
        if dim not in self._parts:
            place = self._rank_info
            names = (naming.dp_name(place.stage, place.tp_rank), naming.tp_name(*place.node))
            replicas = range(place.topology.replicas(place.stage))
            nodes = (place.topology.ranks_of(Node(place.stage, replica)) for replica in replicas)
            stage = DeviceMesh.from_group(
                [self._group_of(name) for name in names],
                self._device.type,
                mesh=[[place.ranks[rank] for rank in node] for node in nodes],
                mesh_dim_names=naming.unique_dims(),
            )
            dims = stage.mesh_dim_names
            assert dims is not None
            self._parts = {"dp": stage[dims[0]], "tp": stage[dims[1]]}
        return self._parts[dim]

    def clear(self) -> None:
        """Let go of them, and so of their groups."""
        self._parts.clear()

    def _group_of(self, name: str) -> dist.ProcessGroup:
        """A group of ``group_specs``, or, for one that has this rank alone, a group made now."""
        if name not in self._groups:
            if not dist.is_initialized():
                raise LdtError("a DeviceMesh needs torch.distributed.init_process_group, also for one rank")
            backend = choose_backend(self._device, self._backend)
            me = [self._rank_info.global_rank]
            self._groups.make(name, f"{self._key}/{name}/{me[0]}", me, backend, timedelta(seconds=60))
        return self._groups[name]
