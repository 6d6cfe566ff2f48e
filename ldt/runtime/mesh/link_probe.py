"""Measures latency, jitter and bandwidth of the links, over the lanes that steps use, with the messages of all ranks.

All channels between two sites are measured at once, as they share a pipe in each direction, and so are all between two
nodes of a site. First messages of one byte go there and back. Then all channels send trains of messages, both ways,
until a train lasts for many round trips. Its best quarter counts, not the first, while congestion windows open and
queues fill: TCP does not keep a long link full all the time. Last come single messages, one after the other: how much
longer the second slowest of them takes than the fastest is the jitter between two sites.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.mesh.probe_tasks import (
    Task,
    arrived_by,
    receive_train,
    round_trips,
    run_tasks,
    send_trains,
)
from ldt.topology import Channel, Node, Topology

__all__ = ["LinkFigures", "probe_links", "rounds"]

_ROUND_TRIPS = 5
_SINGLE_MESSAGES = (3, 16)  # each way, at least and at most
_SINGLE_SECONDS = 2.0  # each way, about, if that is enough for the least
_TRAIN_ROUND_TRIPS = 60
_PARTS = 16  # equal parts of a train, whose bytes are counted
_QUARTER = _PARTS // 4
_TRAIN_SECONDS = (0.1, 3.0)  # at least, at most
_FIRST_MESSAGES, _MOST_MESSAGES, _GROWTH = 2, 4096, 8
_LONG_ENOUGH = 0.6  # of the seconds to last for
_IN_FLIGHT = 64 << 20  # bytes of all channels of a pipe: more than any window of TCP
# Of a message, at least and at most: shorter ones show what the host does for each, longer ones only take longer.
_CROSSING_BYTES = (1 << 20, 4 << 20)
_LOCAL_BYTES = (8 << 20, 64 << 20)


@dataclass(frozen=True)
class LinkFigures:
    """``latency``: one-way seconds of a message of one byte. ``jitter``: by how many seconds messages are later.

    ``up`` and ``down``: bytes per second to a stage of a greater number, and back.

    Hops that share a pipe have equal ``up`` and ``down``: those of all that crosses it.
    """

    latency: float
    jitter: float
    up: float
    down: float


def probe_links(mesh: Mesh, nbytes: Mapping[int, int]) -> dict[int, LinkFigures]:
    """The figures of each hop between nodes, equal on every rank. A collective call of all ranks.

    ``nbytes`` has the bytes of a message by hop. Of replicas the slowest counts; jitter is that of the largest messages
    between two sites, on one replica.
    """
    latencies: dict[str, float] = {}
    jitters: dict[str, float] = {}
    rates: dict[str, float] = {}
    for channels in rounds(mesh.topology):
        found = _latencies(mesh, channels)
        is_local = mesh.topology.is_local(channels[0])
        least, most = _LOCAL_BYTES if is_local else _CROSSING_BYTES
        widest = max(channels, key=lambda channel: nbytes.get(channel.hop, 0))
        largest = min(nbytes.get(widest.hop, 0), most)
        size = max(least, largest)
        shortest, longest = _TRAIN_SECONDS
        seconds = min(max(shortest, 2 * _TRAIN_ROUND_TRIPS * max(found.values())), longest)
        rates |= _rates(mesh, channels, size, seconds)
        latencies = _merged(max, [latencies, found])
        once = 2 * max(found.values()) + largest / min(rates[mesh.topology.pipe_of(one)] for one in channels)
        jitters |= dict.fromkeys(found, 0.0 if is_local else _jitter(mesh, widest, max(1, largest), once))
    return {
        int(hop): LinkFigures(latency, jitters[hop], *_slowest(mesh.topology, int(hop), rates))
        for hop, latency in latencies.items()
    }


def rounds(topology: Topology) -> list[list[Channel]]:
    """The channels to measure at once: all between two sites, or between nodes of a site, each node with one other."""
    links: dict[frozenset[str], list[Channel]] = defaultdict(list)
    for channel in topology.channels:
        links[frozenset(map(topology.pipe_of, _both_ways(topology, channel)))].append(channel)
    crossing = [link for link in links.values() if not topology.is_local(link[0])]
    local: list[tuple[set[Node], list[Channel]]] = []
    for link in links.values():
        if topology.is_local(link[0]):
            nodes = {link[0].source, link[0].target}
            taken, channels = next((one for one in local if not one[0] & nodes), (set(), []))
            if not taken:
                local.append((taken, channels))
            taken |= nodes
            channels += link
    return [*crossing, *(channels for _, channels in local)]


def _both_ways(topology: Topology, channel: Channel) -> tuple[Channel, Channel]:
    hop, replica = channel.hop, channel.replica
    return topology.channel(hop, "F", replica), topology.channel(hop, "B", replica)


def _slowest(topology: Topology, hop: int, rates: Mapping[str, float]) -> tuple[float, float]:
    """Of the pipes of all replicas, up and down."""
    found: dict[bool, list[float]] = defaultdict(list)
    for replica in range(topology.dp):
        for channel in _both_ways(topology, topology.channel(hop, "F", replica)):
            found[channel.source.stage < channel.target.stage].append(rates[topology.pipe_of(channel)])
    return min(found[True]), min(found[False])


# -- latency -----------------------------------------------------------------------------------------------------


def _latencies(mesh: Mesh, channels: Sequence[Channel]) -> dict[str, float]:
    """One-way seconds by hop: of the slowest replica, half of the shortest round trip after a first."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    hops: dict[int, list[int]] = defaultdict(list)  # by replica: they share no lane
    for channel in channels:
        if channel.direction == "F":
            hops[channel.replica].append(channel.hop)

    def of_replica(replica: int) -> Task:
        for hop in hops[replica]:
            there, back = map(
                mesh.endpoints.get, _both_ways(mesh.topology, mesh.topology.channel(hop, "F", replica))
            )
            yield from round_trips(there, back, 1 + _ROUND_TRIPS, mesh.device, found[hop, replica])

    run_tasks([of_replica(replica) for replica in hops], mesh.watchdog)
    own = [{str(hop): min(times[1:]) / 2} for (hop, _), times in found.items() if times]
    return _merged(max, mesh.control.all_gather(_merged(max, own), _read_figures))


# -- jitter ------------------------------------------------------------------------------------------------------


def _jitter(mesh: Mesh, channel: Channel, nbytes: int, once: float) -> float:
    """Seconds, of messages of ``nbytes`` on the channel's hop, which take about ``once`` seconds each."""
    there, back = map(mesh.endpoints.get, _both_ways(mesh.topology, channel))
    fewest, most = _SINGLE_MESSAGES
    number = max(fewest, min(int(_SINGLE_SECONDS / once), most))
    times: tuple[list[float], list[float]] = ([], [])

    def both_ways() -> Task:
        for one, other, seconds in ((there, back, times[0]), (back, there, times[1])):
            yield from round_trips(one, other, 1 + number, mesh.device, seconds, nbytes)

    run_tasks([both_ways()] if there is not None or back is not None else [], mesh.watchdog)
    own = {"jitter": max((sorted(found[1:])[-2] - min(found[1:]) for found in times if found), default=0.0)}
    return _merged(max, mesh.control.all_gather(own, _read_figures))["jitter"]


# -- bandwidth ---------------------------------------------------------------------------------------------------


def _rates(mesh: Mesh, channels: Sequence[Channel], nbytes: int, seconds: float) -> dict[str, float]:
    """Bytes per second by pipe, of trains that last for about ``seconds`` on each."""
    pipes: dict[str, list[str]] = defaultdict(list)
    for channel in channels:
        pipes[mesh.topology.pipe_of(channel)].append(channel.name)
    counts = dict.fromkeys(pipes, _FIRST_MESSAGES)
    while True:
        arrivals = _run_trains(mesh, channels, counts, nbytes)
        own = {name: times[-1] for name, times in arrivals.items()}
        ends = _merged(max, mesh.control.all_gather(own, _read_figures))
        longer = {
            pipe: _longer(counts[pipe], max(ends[name] for name in names), seconds)
            for pipe, names in pipes.items()
        }
        if longer == counts:
            break
        counts = longer
    # Until the first channel has ended all share the pipe.
    part = {name: min(ends[one] for one in names) / _PARTS for names in pipes.values() for name in names}
    own = {
        f"{name} {index}": arrived_by(index * part[name], times, nbytes)
        for name, times in arrivals.items()
        for index in range(_QUARTER, _PARTS + 1)
    }
    arrived = _merged(min, mesh.control.all_gather(own, _read_figures))

    def rate(names: Sequence[str], begin: int) -> float:
        end = begin + _QUARTER
        carried = sum(arrived[f"{name} {end}"] - arrived[f"{name} {begin}"] for name in names)
        return carried / (_QUARTER * part[names[0]])

    begins = range(_QUARTER, _PARTS - _QUARTER + 1)
    return {pipe: max(rate(names, begin) for begin in begins) for pipe, names in pipes.items()}


def _longer(count: int, lasted: float, seconds: float) -> int:
    """The messages of the next train: as many if it lasted long enough."""
    if lasted >= _LONG_ENOUGH * seconds:
        return count
    return min(math.ceil(count * min(_GROWTH, 1.2 * seconds / lasted)), _MOST_MESSAGES)


def _run_trains(
    mesh: Mesh, channels: Sequence[Channel], counts: Mapping[str, int], nbytes: int
) -> dict[str, list[float]]:
    """Send a train on each channel at once. Returns the seconds after which its messages had arrived here."""
    arrivals: dict[str, list[float]] = {}
    tasks: list[Task] = []
    for pipe, count in counts.items():
        sharing = [channel for channel in channels if mesh.topology.pipe_of(channel) == pipe]
        depth = max(2, _IN_FLIGHT // (nbytes * len(sharing)))
        endpoints = [mesh.endpoints[channel] for channel in sharing if channel in mesh.endpoints]
        sending = [endpoint for endpoint in endpoints if endpoint.sends]
        tasks.append(send_trains(sending, nbytes, count, depth, mesh.device))
        for endpoint in endpoints:
            if not endpoint.sends:
                times = arrivals[endpoint.channel.name] = []
                tasks.append(receive_train(endpoint, nbytes, count, depth, mesh.device, times))
    start = time.perf_counter()
    run_tasks(tasks, mesh.watchdog)
    return {name: [moment - start for moment in times] for name, times in arrivals.items()}


# -- figures of all ranks ----------------------------------------------------------------------------------------


def _read_figures(value: Any) -> dict[str, float]:
    """Parse the figures of one rank."""
    return {str(name): float(figure) for name, figure in value.items()}


def _merged(
    choose: Callable[[Iterable[float]], float], figures: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The largest or smallest figure of each name."""
    names = dict.fromkeys(name for found in figures for name in found)
    return {name: choose(found[name] for found in figures if name in found) for name in names}
