"""Messages in turn: nothing waits on a device for what its rank does next."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.mesh.mesh import Mesh
from ldt.topology import Channel, LaneKey, lanes

__all__ = ["endpoints_in_turn"]

_POLL_SECONDS = 2e-4


def endpoints_in_turn(mesh: Mesh, key: str) -> dict[Channel, Endpoint]:
    """Return this rank's endpoints for one call that runs its plan without leaving anything to wait on the device.

    A receive is posted when the action that uses it is about to run, and its rank says so in the store, under ``key``.
    A send is launched after that. The host waits for both, so the call overlaps no transfer with compute. Actions keep
    their order, and messages that of their lane.
    """
    turns = _Turns(mesh, key)
    by_lane = lanes(mesh.topology, mesh.lanes)
    return {
        channel: _EndpointInTurn(endpoint, turns, by_lane[channel])
        for channel, endpoint in mesh.endpoints.items()
    }


class _Turns:
    """The messages of a call on this rank that are not under way, in the order of each lane."""

    def __init__(self, mesh: Mesh, key: str) -> None:
        self._watchdog, self._is_leader, self._key = mesh.watchdog, mesh.is_leader, key
        self._sends: dict[LaneKey, deque[_Send]] = defaultdict(deque)
        self._receives: dict[LaneKey, deque[_Receive]] = defaultdict(deque)
        self._launched: Counter[Channel] = Counter()

    def add_send(self, lane: LaneKey, send: _Send) -> None:
        self._sends[lane].append(send)
        self.launch_sends()

    def add_receive(self, lane: LaneKey, receive: _Receive) -> None:
        self._receives[lane].append(receive)

    def launch_sends(self) -> None:
        """Launch the sends whose receivers have posted."""
        for queue in self._sends.values():
            while queue and self._posted(queue[0].channel) > self._launched[queue[0].channel]:
                self._launched[queue[0].channel] += 1
                queue.popleft().launch()

    def post_until(self, lane: LaneKey, receive: _Receive) -> None:
        """Post the receives of ``lane`` up to that one, each when the one before has ended."""
        while receive.work is None:
            following = self._receives[lane].popleft()
            following.work = following.post()
            if self._is_leader:
                self._watchdog.store.add(self._counter(following.channel), 1)
            # On the host alone: a send launched meanwhile reads behind the current stream, which must not wait.
            self.wait_for(following.work.is_completed)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Launch sends until ``condition`` holds. Raises RemoteStageError if another rank failed."""
        while not condition():
            self._watchdog.check()
            self.launch_sends()
            time.sleep(_POLL_SECONDS)

    def _posted(self, channel: Channel) -> int:
        """How many receives of ``channel`` the node at its other end has posted."""
        return int(self._watchdog.store.add(self._counter(channel), 0))

    def _counter(self, channel: Channel) -> str:
        return f"{self._key}/{channel.name}"


class _EndpointInTurn(Endpoint):
    def __init__(self, endpoint: Endpoint, turns: _Turns, lane: LaneKey) -> None:
        super().__init__(**{field.name: getattr(endpoint, field.name) for field in fields(Endpoint)})
        self.__dict__.update(inner=endpoint, turns=turns, key=lane)  # the class is frozen
        self.inner: Endpoint
        self.turns: _Turns
        self.key: LaneKey

    def send_parts(self, parts: Parts, label: str) -> Any:
        send = _Send(self.turns, self.channel, lambda: self.inner.send_parts(parts, label))
        self.turns.add_send(self.key, send)
        return send if parts.keys() & self.stripes.keys() else None

    def receive_parts(self, parts: Parts, label: str) -> Any:
        receive = _Receive(self.turns, self.key, self.channel, lambda: self.inner.receive_parts(parts, label))
        self.turns.add_receive(self.key, receive)
        return receive


class _Send:
    """A send that starts later: the part of a work that the runtime uses."""

    def __init__(self, turns: _Turns, channel: Channel, start: Callable[[], CompositeWork | None]) -> None:
        self.channel = channel
        self._turns, self._start = turns, start
        self._is_launched = False
        self._work: CompositeWork | None = None  # stays None if this rank sends no part of the message

    def launch(self) -> None:
        self._work, self._is_launched = self._start(), True

    def wait(self) -> bool:
        self._turns.wait_for(lambda: self._is_launched)
        return self._work is None or self._work.wait()

    def is_completed(self) -> bool:
        self._turns.launch_sends()
        return self._is_launched and (self._work is None or self._work.is_completed())


class _Receive:
    """A receive that is posted when it is waited for."""

    def __init__(
        self, turns: _Turns, lane: LaneKey, channel: Channel, post: Callable[[], CompositeWork]
    ) -> None:
        self.channel, self.post = channel, post
        self.work: CompositeWork | None = None
        self._turns, self._lane = turns, lane

    def wait(self) -> bool:
        self._turns.post_until(self._lane, self)
        assert self.work is not None
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()
