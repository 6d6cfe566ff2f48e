"""Finds the critical path of a timeline."""

from __future__ import annotations

from collections import defaultdict

from ldt.plan.action import Kind
from ldt.plan.message import message_into
from ldt.plan.timeline import Event, Timeline

__all__ = ["critical_path"]


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """Return the chain of events from the start to the end of the step, each of which waited for the previous one.

    An event waited for whichever of these ended last. A compute action: its message, the previous action on its node
    and, behind a reduction, those of the other replicas. A transfer: its producer, the previous message on its
    pipe, and the use of an earlier message that freed a receive buffer.
    Latencies belong to their transfers; any other gap lies between two events.
    """
    if not timeline.events:
        return ()
    causes = _Causes(timeline)
    path = [max(timeline.events, key=lambda event: (event.end, event.start))]
    while (before := causes.of(path[-1])) is not None:
        path.append(before)
    return tuple(reversed(path))


class _Causes:
    def __init__(self, timeline: Timeline) -> None:
        self._tolerance = 1e-9 * max(abs(timeline.start), abs(timeline.end))
        self._producers: dict[object, Event] = {}  # by their own node, chunk, direction, microbatch
        self._messages: dict[object, Event] = {}  # by their receive's node, chunk, direction, microbatch
        self._previous: dict[Event, Event] = {}  # the previous event on the node or the pipe
        self._of_stage: dict[int, list[Event]] = defaultdict(list)  # compute events of all replicas
        self._uses: dict[object, list[Event]] = defaultdict(list)  # by channel
        self._replicas = [timeline.topology.replicas(s) for s in range(timeline.topology.num_stages)]
        self._number = {event: number for number, event in enumerate(timeline.events)}
        last: dict[object, Event] = {}
        channels = {(c.hop, c.direction, c.replica): c for c in timeline.topology.channels}
        for event in timeline.events:
            node, (chunk, kind, microbatch) = event.node, event.action
            resource: object = node
            if event.channel is not None:
                resource = timeline.topology.pipe_of(event.channel)
                receive = event.action.counterpart
                key = event.channel.target, receive.chunk, event.channel.direction, microbatch
                self._messages[key] = event
            elif kind.is_compute:
                direction = "F" if kind is Kind.F else "B"
                if kind is not Kind.W:
                    self._producers[node, chunk, direction, microbatch] = event
                self._of_stage[node.stage].append(event)
                source = message_into(event.action)
                assert microbatch is not None
                replica = timeline.topology.cloud_replica(node, microbatch)
                channel = channels.get((*source, replica)) if source else None
                if channel is not None:
                    self._uses[channel].append(event)
            else:
                continue
            if resource in last:
                self._previous[event] = last[resource]
            last[resource] = event

    def of(self, event: Event) -> Event | None:
        """The event that ``event`` waited for, always an earlier one in the timeline; None for the first."""
        number = self._number[event]
        found = self._of_compute(event) if event.channel is None else self._of_transfer(event)
        own, others = ([cause for cause in causes if self._number[cause] < number] for causes in found)
        for cause in (*own, *others):
            if abs(cause.end - event.start) <= self._tolerance:
                return cause
        if event.channel is not None and event in self._previous:
            return self._previous[event]  # the link was busy
        return max(own, key=lambda cause: cause.end, default=None)

    def _of_compute(self, event: Event) -> tuple[list[Event], list[Event]]:
        """Its message and the previous action; the actions that it may have waited for in a reduction."""
        chunk, kind, microbatch = event.action
        message = self._messages.get((event.node, chunk, "F" if kind is Kind.F else "B", microbatch))
        own = [message] if message is not None and kind is not Kind.W else []
        if event in self._previous:
            own.append(self._previous[event])
        alone = self._replicas[event.node.stage] == 1
        return own, [] if alone else self._of_stage[event.node.stage]

    def _of_transfer(self, event: Event) -> tuple[list[Event], list[Event]]:
        """Its producer; the actions that may have freed a receive buffer for it."""
        assert event.channel is not None
        key = event.node, event.action.chunk, event.channel.direction, event.action.microbatch
        return [self._producers[key]] if key in self._producers else [], self._uses[event.channel]
