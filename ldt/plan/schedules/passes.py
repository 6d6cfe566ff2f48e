"""Passes over plans: pure functions that add or remove communication and gradient reduction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ldt.errors import PlanError
from ldt.plan.action import Action, Kind
from ldt.plan.checks.verifier import prove
from ldt.plan.costs import UNIT_COSTS, Costs
from ldt.plan.levels import peak_level
from ldt.plan.message import message_into, message_out_of
from ldt.plan.plan import Plan
from ldt.plan.sim.engine import Computed, Run
from ldt.topology import Channel, LanePolicy, Node, Topology, lanes

__all__ = [
    "add_communication",
    "add_grad_reduction",
    "buffers_needed",
    "check_buffers",
    "remove_communication",
]


def add_communication(
    plan: Plan, policy: LanePolicy, receive_buffers: int | None = 2, costs: Costs = UNIT_COSTS
) -> Plan:
    """Add sends and receives for the lanes of ``policy``. Existing ones are removed first.

    1. Run the compute rows with ``costs``. The order in which the actions end gives one total order of all
       transfers. A send goes right after its compute action; a receive goes behind the actions of its row that
       ended before its producer did. So every queue of every lane is a subsequence of that order, and the first
       transfer that has not happened is at the head of both its queues: no deadlock, under any lane policy.
       Reductions keep their position in that order, behind the sends of the actions that ended before them.
    2. Post receives earlier, as far as ``receive_buffers`` messages per channel allow: receive i right after the
       action that uses message i - receive_buffers, never before another receive of its lane. Posting earlier
       with the same order in every queue delays nothing. If step 1 needs more buffers, it gets them, except on a
       dedicated lane whose messages are used in the order in which they are sent: there the receive is posted
       later. Only the use of message i and its successors wait for that, and they follow the use of message
       i - receive_buffers anyway, so no deadlock arises either. With ``receive_buffers=None`` each channel gets
       enough buffers that no message of that run waits for one: over a slow link, all that are in flight at once.

    Raises PlanError if the compute rows alone are not a valid plan.
    """
    check_buffers(receive_buffers)
    plan = remove_communication(plan)
    ideal = prove(plan, costs, None)
    fixed = dict.fromkeys(plan.topology.channels, receive_buffers or 1)
    buffers = fixed if receive_buffers else fixed | _buffers_used(plan.topology, ideal)
    placement = _Placement(plan, policy, buffers)
    placement.find_delayable(ideal.computed)
    for computed in ideal.computed:
        placement.add(computed)
    return plan.with_rows({node: list(placement.row(node)) for node in plan.rows}, policy)


def check_buffers(receive_buffers: int | None) -> None:
    """Raise PlanError if ``receive_buffers`` is less than 1."""
    if receive_buffers is not None and receive_buffers < 1:
        raise PlanError(f"receive_buffers must be at least 1, got {receive_buffers}")


def remove_communication(plan: Plan) -> Plan:
    """Return the plan without its sends and receives."""
    rows = {node: [action for action in row if not action.kind.is_comm] for node, row in plan.rows.items()}
    return plan.with_rows(rows, None)


def add_grad_reduction(plan: Plan) -> Plan:
    """Reduce each chunk's gradients once, after its last backward and send, if its stage has replicas.

    If the replicas of a stage run in different orders, as those that share an edge do, reductions go to the end of
    their rows. Earlier, one replica could wait for another that waits for a later action of the first.
    """
    rows = {
        node: [action for action in row if action.kind is not Kind.REDUCE_GRAD]
        for node, row in plan.rows.items()
    }
    if plan.training:
        for stage in range(plan.topology.num_stages):
            nodes = [node for node in rows if node.stage == stage]
            reduced = _add_reductions(plan.topology, stage, [rows[node] for node in nodes])
            rows.update(zip(nodes, reduced, strict=True))
    return plan.with_rows(rows, plan.lanes)


def buffers_needed(plan: Plan) -> dict[Channel, int]:
    """Return for each channel with receives the maximum number that are posted and not yet used."""
    posted: dict[Channel, int] = defaultdict(int)
    most: dict[Channel, int] = {}
    for node, row in plan.rows.items():
        waiting: dict[tuple[int, str, int | None], Channel] = {}
        for action in row:
            if action.kind.is_receive:
                channel = plan.channel_of(action, node)
                waiting[action.hop, action.kind.direction, action.microbatch] = channel
                posted[channel] += 1
                most[channel] = max(most.get(channel, 0), posted[channel])
            elif action.kind.is_compute and (source := message_into(action)) is not None:
                used = waiting.pop((*source, action.microbatch), None)
                if used is not None:
                    posted[used] -= 1
    return most


def _buffers_used(topology: Topology, ideal: Run) -> dict[Channel, int]:
    """Per channel of a run without limits, the maximum number of messages sent and not yet used.

    One more where channels share a pipe: a message takes its turn before it starts, and needs a buffer by then.
    """
    changes: dict[Channel, list[tuple[float, float]]] = defaultdict(list)
    used_at: dict[tuple[int, str, int, int], float] = {}
    for node, action, _, end in ideal.computed:
        if (source := message_into(action)) is not None:
            hop, direction = source
            assert action.microbatch is not None
            replica = topology.cloud_replica(node, action.microbatch)
            used_at[hop, direction, replica, action.microbatch] = end
    for (channel, microbatch), start, _ in ideal.transferred:
        used = used_at[channel.hop, channel.direction, channel.replica, microbatch]
        changes[channel] += [(start, 1), (used, -1)]
    sharing = Counter(map(topology.pipe_of, topology.channels))
    return {
        channel: max(1, int(peak_level(moments))) + (sharing[topology.pipe_of(channel)] > 1)
        for channel, moments in changes.items()
    }


def _add_reductions(topology: Topology, stage: int, rows: Sequence[list[Action]]) -> Iterator[list[Action]]:
    """Yield the rows of the replicas of ``stage`` with their reductions."""
    orders = [[action for action in row if action.kind.is_compute] for row in rows]
    alike = all(order == orders[0] for order in orders)
    for row in rows:
        if len(rows) == 1:
            yield row
        elif alike:
            yield _reduce_after_last_backward(row)
        else:
            yield row + [Action(chunk, Kind.REDUCE_GRAD) for chunk in reversed(topology.chunks_of(stage))]


def _reduce_after_last_backward(row: Sequence[Action]) -> list[Action]:
    row = list(row)
    last = {action.chunk: index for index, action in enumerate(row) if action.kind in (Kind.B, Kind.W)}
    for chunk, index in sorted(
        last.items(), key=lambda item: -item[1]
    ):  # from the end, so that indices stay valid
        after = index + 1
        while after < len(row) and row[after].kind.is_send:
            after += 1
        row.insert(after, Action(chunk, Kind.REDUCE_GRAD))
    return row


class _Placement:
    """Places sends and receives into the gaps before the actions of compute rows."""

    def __init__(self, plan: Plan, policy: LanePolicy, receive_buffers: Mapping[Channel, int]) -> None:
        self._plan, self._receive_buffers = plan, receive_buffers
        self._lane_of = lanes(plan.topology, policy)
        self._delayable = set(plan.topology.channels) if policy == "dedicated" else set()
        self._channels = {(c.hop, c.direction, c.replica): c for c in plan.topology.channels}
        self._index = {node: {action: i for i, action in enumerate(row)} for node, row in plan.rows.items()}
        self._ended = dict.fromkeys(plan.rows, 0)  # the gap behind the ended actions of the row
        # Per channel: the gaps behind the users of its messages.
        self._users: dict[Channel, list[int]] = defaultdict(list)
        # Gap of the last receive of a lane at a node.
        self._last: dict[tuple[object, Node], int] = defaultdict(int)
        self._sends: dict[tuple[Node, int], list[Action]] = defaultdict(list)
        self._receives: dict[tuple[Node, int], list[Action]] = defaultdict(list)

    def find_delayable(self, order: Iterable[Computed]) -> None:
        """Find the channels whose receives may be posted later: dedicated, and used in the order of their sends."""
        last: dict[Channel, int] = {}
        for computed in order:
            channel = self._channel_out_of(computed)
            if channel is None:
                continue
            send = Action.send_of(channel.hop, channel.direction, computed.action.microbatch)
            user = self._index[channel.target][self._user(channel.target, send.counterpart)]
            if user < last.get(channel, 0):
                self._delayable.discard(channel)
            last[channel] = user

    def _channel_out_of(self, computed: Computed) -> Channel | None:
        node, action, _, _ = computed
        target = message_out_of(action)
        if target is None or action.microbatch is None:
            return None
        replica = self._plan.topology.cloud_replica(node, action.microbatch)
        return self._channels.get((*target, replica))

    def add(self, computed: Computed) -> None:
        """Place the transfer of the next action's result in the total order."""
        node, action = computed.node, computed.action
        gap = self._ended[node] = self._index[node][action] + 1
        channel = self._channel_out_of(computed)
        if channel is None:
            return
        send = Action.send_of(channel.hop, channel.direction, action.microbatch)
        self._sends[node, gap].append(send)
        self._receives[channel.target, self._receive_gap(channel, send)].append(send.counterpart)

    def _receive_gap(self, channel: Channel, send: Action) -> int:
        node, users = channel.target, self._users[channel]
        buffers = self._receive_buffers[channel]
        free = users[-buffers] if len(users) >= buffers else 0
        users.append(self._index[node][self._user(node, send.counterpart)] + 1)
        key = (self._lane_of[channel], node)
        latest = free if channel in self._delayable else self._ended[node]
        self._last[key] = min(latest, max(free, self._last[key]))
        return self._last[key]

    def _user(self, node: Node, receive: Action) -> Action:
        kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
        actions = (Action(receive.chunk, kind, receive.microbatch) for kind in kinds)
        return next(action for action in actions if action in self._index[node])

    def row(self, node: Node) -> Iterator[Action]:
        row = self._plan.rows[node]
        for gap in range(len(row) + 1):
            yield from self._sends[node, gap]
            yield from self._receives[node, gap]
            yield from row[gap : gap + 1]
