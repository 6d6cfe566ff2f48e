"""Host links: messages of devices on different sites, through pinned host memory and over socket links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ldt._C import LaneError, SocketLink
from ldt.runtime.comm.ipc_links import IpcLink, LaneEnds, LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.socket_links import SocketConnector

__all__ = ["connect_host_links"]


def connect_host_links(
    links: Mapping[LaneId, Sequence[IpcLink]],
    ends: Mapping[LaneId, LaneEnds],
    layout: LaneLayout,
    sockets: SocketConnector,
) -> tuple[dict[int, SocketLink], dict[str, str]]:
    """Add this rank's ends of ``links`` to ``ends``. Returns its socket links by peer, and why links failed by name.

    A collective call of all ranks. ``links`` has all lanes, in the same order on all ranks: the position of a lane is
    its number on the socket links.
    """
    made = sockets.connect(link for found in links.values() for link in found)
    failures: dict[str, str] = {}
    for number, (lane, found) in enumerate(links.items()):
        for link in found:
            if layout.rank in (link.source, link.target):
                peer = made[link.source + link.target - layout.rank]
                try:
                    ends[lane].add_host_end(link, layout.rank, layout.device, peer, number)
                except LaneError as error:
                    failures[link.name] = str(error)
    return made, failures
