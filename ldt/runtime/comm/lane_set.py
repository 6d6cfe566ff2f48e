"""The lanes of a rank: their endpoints by channel, their transports, and their teardown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ldt._C import Lane, SocketLink
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.ipc_links import LaneId
from ldt.runtime.comm.lane_layout import LaneLayout
from ldt.runtime.comm.transports import LaneTransport
from ldt.runtime.common.teardown import run_teardown
from ldt.runtime.common.time_left import time_left
from ldt.topology import Channel, lanes

__all__ = ["LaneSet"]


class LaneSet:
    """This rank's lanes. Empty before ``set`` and after ``clear``."""

    def __init__(self) -> None:
        self.endpoints: dict[Channel, Endpoint] = {}
        self._layout: LaneLayout | None = None
        self._transports: Mapping[LaneId, LaneTransport] = {}
        self._watched: tuple[Lane, ...] = ()  # only ever replaced: the watchdog's thread reads it
        self._links: tuple[SocketLink, ...] = ()  # likewise

    def set(
        self,
        layout: LaneLayout,
        transports: Mapping[LaneId, LaneTransport],
        endpoints: Mapping[Channel, Endpoint],
    ) -> None:
        """Take over the endpoints of a mesh that is being connected."""
        self._layout, self._transports = layout, transports
        self.endpoints.update(endpoints)
        self._watched = tuple(self.all())
        self._links = tuple({id(link): link for t in transports.values() for link in t.links}.values())

    def all(self) -> list[Lane]:
        """Every lane, once."""
        ends = (end for endpoint in self.endpoints.values() for end in endpoint.stripes.values())
        return list({id(end.lane): end.lane for end in ends}.values())

    def transport_of(self, channel: Channel) -> str:
        """The transport of ``channel``, or of its stripes where they differ: "c10d and copy_engine".

        Raises KeyError if this rank has no end of ``channel``.
        """
        stripes, layout = self.endpoints[channel].stripes, self._layout
        assert layout is not None
        key = lanes(layout.topology, layout.policy)[channel]
        sites = layout.topology.sites
        crosses = sites[channel.source.stage] != sites[channel.target.stage]  # others may share the lane
        found = filter(None, (self._transports.get((key, one)) for one in stripes))
        kinds = [one.kind if crosses else one.in_site for one in found]
        return " and ".join(sorted({*kinds, *(["c10d"] if len(kinds) < len(stripes) else [])}))

    def overdue(self) -> str:
        """Describes a transfer that exceeds its timeout; "" if there is none. Called by the watchdog thread."""
        return next(filter(None, (lane.overdue() for lane in self._watched)), "")

    def abort(self, reason: str) -> None:
        """Abort all transfers in flight. May be called from any thread."""
        run_teardown((f"abort lane {lane.name}", partial(lane.abort, reason)) for lane in self._watched)
        run_teardown(("abort a socket link", partial(link.abort, reason)) for link in self._links)

    def close(self, deadline: float) -> BaseException | None:
        """Finish the transfers in flight by ``deadline`` and close every lane. Returns the first error."""
        closing: Sequence[Lane | SocketLink] = [*self.all(), *self._links]
        return run_teardown((f"close {_name(one)}", partial(_close, one, deadline)) for one in closing)

    def clear(self) -> None:
        """Drop the lanes and their references to groups."""
        self.endpoints.clear()
        self._transports, self._watched, self._links = {}, (), ()


def _close(one: Lane | SocketLink, deadline: float) -> None:
    one.close(time_left(deadline))


def _name(one: Lane | SocketLink) -> str:
    return f"lane {one.name}" if isinstance(one, Lane) else "a socket link"
