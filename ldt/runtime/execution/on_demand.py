"""Messages on demand: nothing waits on a device for what its rank does next."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ldt.runtime.comm.endpoint import Endpoint, Parts
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.mesh.mesh import Mesh
from ldt.topology import Channel, lanes

__all__ = ["Messages", "OnDemand"]

_POLL_SECONDS = 2e-4
_LEAST_PAUSE = 1e-3  # between looks at the store, whose connection the watchdog needs, too


class Messages:
    """The messages of one call: receives are posted ahead, sends are launched at once."""

    def __init__(self, endpoints: Mapping[Channel, Endpoint]) -> None:
        self._endpoints = endpoints

    def endpoint(self, channel: Channel) -> Endpoint | None:
        """This rank's end of ``channel`` in this call; None on ranks that have none."""
        return self._endpoints.get(channel)

    def close(self) -> None:
        """Drop what a failure left. Endpoints hold lanes, which must not live longer than their mesh."""

    def begin_compute(self) -> None:
        """Called before a compute action is launched."""

    def end_reduction(self, is_done: Callable[[], bool]) -> None:
        """Called after a reduction is launched."""


class OnDemand(Messages):
    """The messages of one call that leaves nothing to wait on the device.

    A receive is posted when the action that uses it is about to run, and its node counts that in the store, under
    ``key``. A send is launched after that. The host waits for both, for reductions and, ``in_lockstep``, before each
    compute action for the other replicas. So the call overlaps no transfer with compute. Actions keep their order, and
    so do the messages of a lane between two nodes.
    """

    def __init__(self, mesh: Mesh, key: str, in_lockstep: bool) -> None:
        super().__init__(mesh.endpoints)
        self._by_lane = lanes(mesh.topology, mesh.lanes)
        self._mesh, self._key, self._in_lockstep = mesh, key, in_lockstep
        self._sends: dict[object, deque[_Send]] = defaultdict(deque)
        self._receives: dict[object, deque[_Receive]] = defaultdict(deque)
        self._launched: Counter[Channel] = Counter()
        self._num_computed = 0
        self._next_look = 0.0

    def endpoint(self, channel: Channel) -> Endpoint | None:
        inner = super().endpoint(channel)
        order = (self._by_lane[channel], channel.source, channel.target)
        return None if inner is None else _OnDemandEndpoint.around(inner, self, order)

    def close(self) -> None:
        for send in itertools.chain(*self._sends.values()):
            send.drop()
        for receive in itertools.chain(*self._receives.values()):
            receive.drop()
        self._sends.clear()
        self._receives.clear()

    def begin_compute(self) -> None:
        if self._in_lockstep:
            stage, topology = self._mesh.stage, self._mesh.topology
            self._num_computed += 1
            name = f"stage {stage} compute {self._num_computed}"
            expected = topology.replicas(stage) * topology.tp[stage]
            self._count(name, 1)
            with self._mesh.detector.progress.waiting("the other replicas of its stage"):
                self.wait_for(lambda: self._count(name, 0) >= expected)

    def end_reduction(self, is_done: Callable[[], bool]) -> None:
        self.wait_for(is_done)

    def add_send(self, order: object, send: _Send) -> None:
        self._sends[order].append(send)
        self._launch_sends()

    def add_receive(self, order: object, receive: _Receive) -> None:
        self._receives[order].append(receive)

    def post_until(self, order: object, receive: _Receive) -> None:
        """Post the receives before ``receive`` in ``order``, and that one, each when the one before has ended."""
        while receive.work is None:
            following = self._receives[order].popleft()
            posted = following.post()
            if self._mesh.is_leader:
                self._count(following.channel.name, 1)
            # On the host alone: a send launched meanwhile reads behind the current stream, which must not wait.
            self.wait_for(posted.is_completed)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Launch sends until ``condition`` holds, and those wanted by then.

        Raises RemoteStageError if another rank failed.
        """
        while not condition():
            self._mesh.watchdog.check()
            if time.monotonic() > self._next_look:
                self._launch_sends()
            time.sleep(_POLL_SECONDS)
        self._launch_sends()

    def _launch_sends(self) -> None:
        """Launch the sends whose receivers have posted."""
        start = time.monotonic()
        for queue in self._sends.values():
            while queue and self._count(queue[0].channel.name, 0) > self._launched[queue[0].channel]:
                self._launched[queue[0].channel] += 1
                queue.popleft().launch()
        now = time.monotonic()
        self._next_look = now + max(_LEAST_PAUSE, now - start)

    def _count(self, name: str, amount: int) -> int:
        """Add to a counter that all ranks share. Returns the sum."""
        return int(self._mesh.watchdog.store.add(f"{self._key}/{name}", amount))


@dataclass(frozen=True, kw_only=True)
class _OnDemandEndpoint(Endpoint):
    """Launches what ``inner`` sends and receives when ``messages`` says. Messages of one ``order`` keep it."""

    inner: Endpoint
    messages: OnDemand
    order: object

    @classmethod
    def around(cls, inner: Endpoint, messages: OnDemand, order: object) -> _OnDemandEndpoint:
        values = {field.name: getattr(inner, field.name) for field in fields(Endpoint)}
        return cls(**values, inner=inner, messages=messages, order=order)

    def send_parts(self, parts: Parts, label: str) -> Any:
        send = _Send(self.messages, self.channel, lambda: self.inner.send_parts(parts, label))
        self.messages.add_send(self.order, send)
        return send if parts.keys() & self.stripes.keys() else None

    def receive_parts(self, parts: Parts, label: str) -> Any:
        receive = _Receive(
            self.messages, self.order, self.channel, lambda: self.inner.receive_parts(parts, label)
        )
        self.messages.add_receive(self.order, receive)
        return receive


class _Send:
    """A send that is launched later: the part of a work that the runtime uses."""

    def __init__(
        self, messages: OnDemand, channel: Channel, start: Callable[[], CompositeWork | None]
    ) -> None:
        self.channel = channel
        self._messages = messages
        self._start: Callable[[], CompositeWork | None] | None = start  # has the tensors
        self._work: CompositeWork | None = None  # stays None if this rank sends no part of the message

    def launch(self) -> None:
        assert self._start is not None, "launched once"
        self._work, self._start = self._start(), None

    def drop(self) -> None:
        self._start = None

    def wait(self) -> bool:
        self._messages.wait_for(lambda: self._start is None)
        return self._work is None or self._work.wait()

    def is_completed(self) -> bool:
        return self._start is None and (self._work is None or self._work.is_completed())


class _Receive:
    """A receive that is posted when it is waited for."""

    def __init__(
        self, messages: OnDemand, order: object, channel: Channel, post: Callable[[], CompositeWork]
    ) -> None:
        self.channel = channel
        self.work: CompositeWork | None = None
        self._messages, self._order = messages, order
        self._post: Callable[[], CompositeWork] | None = post

    def post(self) -> CompositeWork:
        assert self._post is not None, "posted once"
        self.work, self._post = self._post(), None
        return self.work

    def drop(self) -> None:
        self._post = None

    def wait(self) -> bool:
        self._messages.post_until(self._order, self)
        assert self.work is not None
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()
