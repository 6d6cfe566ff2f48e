"""Runs one row of a plan. A table maps each action kind to a method; no schedule is hard-coded."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.plan import Action, Kind
from ldt.plan.checks.error_context import error_context
from ldt.runtime.comm.endpoint import Endpoint
from ldt.runtime.comm.packed_message import Arrival, receive_message
from ldt.runtime.comm.transfer_modes import CompositeWork
from ldt.runtime.common.chunk_outputs import Outputs, check_device
from ldt.runtime.common.kept import input_specs, kept_specs, mark_kept, sent_specs
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, backward_specs, first_difference, specs_of
from ldt.runtime.execution.absent_grads import AbsentGrads, pack_grads, unpack_grads
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.grad_memory import GradMemory
from ldt.runtime.execution.grad_reduce import GradReduction, check_sparse_gradient
from ldt.runtime.execution.in_flight import InFlightTensors, own_memory, self_overlapping
from ldt.runtime.execution.kept_tensors import KeptTensors
from ldt.runtime.execution.labels import describe, label, microbatch_of, slot_of
from ldt.runtime.execution.observer import ActionWatch
from ldt.runtime.execution.on_demand import Messages
from ldt.runtime.execution.outgoing import Outgoing, message_bytes
from ldt.runtime.execution.recorder import Entry, Recorder
from ldt.runtime.execution.run_ahead import RunAheadLimit
from ldt.runtime.execution.stash import ActivationStash, Slot
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.audit import Audit
from ldt.topology import Channel, Direction

__all__ = ["Executor"]

logger = logging.getLogger(__name__)

BackwardMethod = Callable[[StepState, int, Sequence[torch.Tensor | None]], list[torch.Tensor | None]]


class Executor:
    """Runs this node's row of a plan over the lanes of the mesh. One instance per step."""

    def __init__(
        self,
        mesh: Mesh,
        runners: Mapping[int, ChunkRunner],
        step: StepState,
        messages: Messages,
        recorder: Recorder | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._mesh = mesh
        self._topology = mesh.topology
        self._runners = runners
        self._step = step
        self._messages = messages
        self._stash = ActivationStash()
        self._kept = KeptTensors(mesh.topology)
        self._outbox: dict[Slot, Outgoing] = {}
        self._run_ahead = RunAheadLimit(mesh.device, mesh.watchdog)
        self._sends: dict[Channel, deque[tuple[CompositeWork, Entry]]] = {}
        self._in_flight_tensors = InFlightTensors()
        self._gradients = GradMemory()
        self._receives: dict[Slot, Entry] = {}
        self._local: dict[tuple[int, int], HopSpecs] = {}  # specs of local hops, by microbatch and hop
        self.traffic: dict[Channel, list[int]] = {}  # messages, bytes, bytes before compression
        self.recorder = recorder or Recorder()
        self._audit = audit
        self.position = "the start of the row"
        self._progress = mesh.detector.progress
        self._index = 0
        self._grad_reductions: list[GradReduction] = []
        self._absent_grads = AbsentGrads({})
        self._watch = ActionWatch(None, ())

    def run(self) -> None:
        """Run the whole row. Errors of lanes and chunks pass through; ``position`` says where they occurred."""
        row = self._step.plan.rows[self._mesh.node]
        self._progress.begin(self._step.plan)
        self._watch = ActionWatch(self._step.observer, row)
        self._absent_grads = AbsentGrads(
            Counter(action.chunk for action in row if action.kind in (Kind.B, Kind.I))
        )
        try:
            for self._index, action in enumerate(row):
                self._enter(f"action {action} ({self._index + 1} of {len(row)}): {describe(action)}")
                if action.kind.is_compute:
                    with self._progress.waiting("its device, which is some actions behind"):
                        self._run_ahead.wait()
                    self._messages.begin_compute()
                named = torch.profiler.record_function(f"ldt {action}")
                with self.recorder.action(action) as entry, named, self._watch.around(action):
                    _METHODS[action.kind](self, action, entry)
                if action.kind.is_compute:
                    self._run_ahead.record()
            self._index = len(row)
            self._enter("the end of its row: the last sends and reductions")
            self._flush()
        finally:
            self._stash.clear()
            self._kept.clear()
            self._outbox.clear()
            self._in_flight_tensors.clear()
        assert not any(runner.num_graphs for runner in self._runners.values()), "a graph was left behind"

    def error_context(self) -> str:
        """This node's row around the current action, which is marked."""
        return error_context(self._step.plan, {self._mesh.node: self._index})

    # -- one method per kind ---------------------------------------------------------------------------------

    def _forward(self, action: Action, entry: Entry) -> None:
        outputs, without_graph = self._outputs(action, entry)
        sent = len(sent_specs(self._hop_specs(action.chunk, microbatch_of(action))))
        kept = outputs[sent:]
        del outputs[sent:]
        self._pass_on(action, outputs, without_graph)
        self._kept.put(action.chunk, microbatch_of(action), kept, [i - sent for i in without_graph])

    def _backward(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].sync.set_last(self._watch.is_last(action))
        self._run_backward(action, entry, self._runners[action.chunk].backward)
        self._separate_gradients(action.chunk)

    def _backward_input(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].sync.check_split_backward(action.chunk)
        self._run_backward(action, entry, self._runners[action.chunk].backward_input)

    def _backward_weight(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].backward_weight(self._step, microbatch_of(action))
        self._separate_gradients(action.chunk)

    def _send(self, action: Action, entry: Entry) -> None:
        endpoint = self._messages.endpoint(self._channel(action))
        message = self._outbox.pop(slot_of(action), None)
        if endpoint is None or message is None:
            return  # other ranks of this node send the message, or this hop carries nothing
        earlier = self._sends.setdefault(self._channel(action), deque())
        while earlier and self._reap(*earlier[0]):  # a query costs time; a channel completes sends in order
            earlier.popleft()
        work = endpoint.send_parts(message.parts, label(action))
        if work is not None:
            self._count(action, endpoint, message.specs)
            if self._audit is not None:
                self._audit.write_tensors(
                    self._step.serial,
                    endpoint.channel,
                    microbatch_of(action),
                    message.tensors,
                    message.specs,
                    endpoint.scheme,
                )
            earlier.append((work, entry))

    def _receive(self, action: Action, entry: Entry) -> None:
        slot = Slot(action.chunk, action.kind.direction, microbatch_of(action))
        specs = self._message_specs(action.hop, slot.direction, slot.microbatch)
        if not specs:
            return
        endpoint = self._messages.endpoint(self._channel(action))
        assert endpoint is not None, "every rank of the node receives"
        shapes = list(map(self._mesh.shards.local_shape, specs))
        self._receives[slot] = entry
        self._count(action, endpoint, specs)
        self._stash.put(slot, receive_message(endpoint, specs, shapes, self._mesh.device, label(action)))

    def _reduce(self, action: Action, entry: Entry) -> None:
        if not self._step.reduce_gradients:
            return
        row = self._step.plan.rows[self._mesh.node]
        later = [other.chunk for other in row[self._index + 1 :] if other.kind is Kind.REDUCE_GRAD]
        tied = {id(p) for chunk in later for _, p in self._runners[chunk].named_parameters()}
        own = dict.fromkeys(p for _, p in self._runners[action.chunk].named_parameters())
        parameters = [p for p in own if id(p) not in tied]  # which are reduced once, with the last chunk
        for grad_reduction in self._grad_reductions:  # free the memory of completed reductions
            if grad_reduction.is_done:
                grad_reduction.finish()
        reduction = GradReduction(parameters, self._mesh, f"the gradients of chunk {action.chunk}")
        self._messages.end_reduction(lambda: reduction.is_done)
        self._grad_reductions.append(reduction)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _outputs(self, action: Action, entry: Entry) -> tuple[list[torch.Tensor], list[int]]:
        """The outputs of a chunk, and the indices of those without a graph, which modules may keep."""
        chunk, microbatch = action.chunk, microbatch_of(action)
        runner = self._runners[chunk]
        tensors = runner.forward(
            self._step,
            microbatch,
            [*self._take(Slot(chunk, "F", microbatch), entry), *self._kept.take(chunk, microbatch)],
            input_specs(self._topology, lambda hop: self._hop_specs(hop, microbatch), chunk),
        )
        self._kept.check_unchanged(chunk, microbatch)
        outputs = self._checked(tensors, chunk, microbatch)
        without_graph = [index for index, output in enumerate(outputs) if output.grad_fn is None]
        detached = runner.detach_outputs(microbatch, outputs)
        self._check_divergence(chunk, "F", microbatch, detached)
        return detached, without_graph

    def _run_backward(self, action: Action, entry: Entry, run: BackwardMethod) -> None:
        self._pass_on(action, self._input_grads(action, entry, run))

    def _input_grads(self, action: Action, entry: Entry, run: BackwardMethod) -> list[torch.Tensor | None]:
        chunk, microbatch = action.chunk, microbatch_of(action)
        specs = self._hop_specs(chunk, microbatch)
        grads = unpack_grads(sent_specs(specs), self._take(Slot(chunk, "B", microbatch), entry))
        grads += self._kept.take_grads(chunk, microbatch, kept_specs(specs))
        found: list[Any] = run(self._step, microbatch, grads)
        del grads
        inputs = input_specs(self._topology, lambda hop: self._hop_specs(hop, microbatch), chunk)
        arrived = sum(spec.requires_grad for spec in inputs if not spec.kept)
        self._kept.put_grads(chunk, microbatch, kept_specs(inputs), found[arrived:])
        del found[arrived:]
        if self._topology.crosses(chunk - 1):
            if self._step.guard is not None:
                given = [grad for grad in found if grad is not None]
                self._step.guard.check(
                    given, f"gradient of the input of chunk {chunk} for microbatch {microbatch}"
                )
            found = self._pack_grads(found, chunk, microbatch)
        self._check_divergence(chunk - 1, "B", microbatch, found)
        return [None if grad is None else grad.detach() for grad in found]

    def _separate_gradients(self, chunk: int) -> None:
        of_chunk = (parameter for _, parameter in self._runners[chunk].named_parameters())
        for parameter in self._gradients.separate(chunk, of_chunk):
            check_sparse_gradient(parameter, self._mesh, f"the gradients of chunk {chunk}")

    def _check_divergence(self, hop: int, direction: Direction, microbatch: int, tensors: list[Any]) -> None:
        """Raise LdtError on all ranks of the node if tensors that should be equal on them differ."""
        if self._step.divergence is not None and self._topology.crosses(hop):
            chunk = hop if direction == "F" else hop + 1
            what = "output" if direction == "F" else "gradient of the input"
            self._step.divergence.check(
                hop,
                direction,
                self._message_specs(hop, direction, microbatch),
                tensors[: len(self._message_specs(hop, direction, microbatch))],
                f"{what} of chunk {chunk} for microbatch {microbatch}",
            )

    def _pack_grads(
        self, found: Sequence[torch.Tensor | None], chunk: int, microbatch: int
    ) -> list[torch.Tensor]:
        """The message with the gradients of a chunk's inputs, as its receiver expects it."""
        wanted = [spec for spec in sent_specs(self._hop_specs(chunk - 1, microbatch)) if spec.requires_grad]
        self._absent_grads.check(chunk, microbatch, wanted, found)
        return pack_grads(wanted, found, self._zeros, self._mesh.device)

    def _zeros(self, spec: TensorSpec) -> torch.Tensor:
        """Zeros for an input that a chunk did not use this time: the rank that sent it waits for a gradient."""
        shape = self._mesh.shards.local_shape(spec)
        return spec.from_wire(torch.zeros(shape, dtype=spec.dtype, device=self._mesh.device))

    def _pass_on(self, action: Action, tensors: list[Any], copied: Sequence[int] = ()) -> None:
        """Give the results of ``action`` to the next chunk on this node, or to the send that follows.

        The tensors are fresh from ``detach``, and the runtime no longer holds their originals.
        """
        if not tensors:
            return
        direction: Direction = "F" if action.kind is Kind.F else "B"
        chunk = action.chunk + (1 if direction == "F" else -1)
        slot = Slot(chunk, direction, microbatch_of(action))
        expanded = self_overlapping(tensors) if direction == "F" else []
        shared = [*expanded, *own_memory(tensors, copied)]
        aliasing = self._runners[action.chunk].aliasing
        if shared and direction == "F" and aliasing is not None:
            aliasing.shares(action.chunk, shared)
        hop = min(action.chunk, chunk)
        if not self._topology.crosses(hop):
            self._in_flight_tensors.begin(slot, tensors)
            self._stash.put(slot, tensors)
            return
        replica = self._topology.cloud_replica(self._mesh.node, slot.microbatch)
        endpoint = self._messages.endpoint(self._topology.channel(hop, direction, replica))
        message = Outgoing.of(endpoint, tensors, self._message_specs(hop, direction, slot.microbatch))
        self._in_flight_tensors.begin(slot, message.in_flight)
        self._outbox[slot] = message

    def _take(self, slot: Slot, entry: Entry) -> Sequence[torch.Tensor]:
        """Take the tensors of ``slot`` from the stash. Waits if they are still in flight."""
        hop = slot.chunk - 1 if slot.direction == "F" else slot.chunk
        if not self._message_specs(hop, slot.direction, slot.microbatch):
            return ()
        stashed = self._stash.take(slot)
        if slot.direction == "B":  # the output has been received, so the backward may overwrite it
            self._in_flight_tensors.end(Slot(slot.chunk + 1, "F", slot.microbatch))
        if not isinstance(stashed, Arrival):
            self._in_flight_tensors.end(slot)
            return stashed
        start = self.recorder.now()
        receive = self._receives[slot].action
        with self._progress.waiting(self._describe_message(receive), label(receive)):
            stashed.work.wait()
        now = self.recorder.now()
        self.recorder.has_waited(entry, now - start)
        self._receives.pop(slot).end = now
        return stashed.unpack()

    def _message_specs(self, hop: int, direction: Direction, microbatch: int) -> HopSpecs:
        """The tensors of a message: forward all that are sent, backward the gradients of those that get one."""
        specs = sent_specs(self._hop_specs(hop, microbatch))
        return specs if direction == "F" else backward_specs(specs)

    def _hop_specs(self, hop: int, microbatch: int) -> HopSpecs:
        """The outputs of chunk ``hop``, sent or kept. Empty before the first and after the last chunk."""
        if self._topology.crosses(hop):
            return self._step.hops[microbatch][hop]
        return self._local.get((microbatch, hop), ())

    def _checked(self, tensors: Outputs, chunk: int, microbatch: int) -> list[torch.Tensor]:
        """This rank's parts of a chunk's output. Raises LdtError if they differ from what the receiver expects."""
        crosses = self._topology.crosses(chunk)
        what = f"output of chunk {chunk} for microbatch {microbatch}"
        specs = self._mesh.shards.specs_of(tensors, what) if crosses else specs_of(tensors)
        specs = mark_kept(specs, tensors.num_kept)
        if not self._step.plan.training:
            # a parameter that a chunk returns requires a gradient even here
            specs = tuple(spec.without_grad() for spec in specs)
        if not crosses:
            self._local[microbatch, chunk] = specs
            return list(tensors)
        difference = first_difference(
            self._hop_specs(chunk, microbatch), specs, self._runners[chunk].declares
        )
        if difference is not None:
            raise LdtError(f"{what} is not what was agreed: {difference}")
        check_device(tensors, self._mesh.device, what)
        parts = list(map(self._mesh.shards.local, tensors))
        if self._step.guard is not None:
            self._step.guard.check(parts[: len(parts) - tensors.num_kept], what)
        return parts

    def _count(self, action: Action, endpoint: Endpoint, specs: Sequence[TensorSpec]) -> None:
        """Count a message with all its bytes, whether or not this rank carries them."""
        counts = self.traffic.setdefault(self._channel(action), [0, 0, 0])
        counts[:] = map(sum, zip(counts, (1, *message_bytes(endpoint, specs)), strict=True))

    def _enter(self, position: str) -> None:
        """Record that this rank is now at ``position``. Raises RemoteStageError if the mesh has failed."""
        self._mesh.watchdog.check()
        self.position = position
        self._progress.begin_action(position, self._index)
        logger.debug("%s", position)

    def _describe_message(self, action: Action) -> str:
        """Describe the message that ``action`` sends or receives: its channel and the peer's rank."""
        channel = self._channel(action)
        other, word = (
            (channel.source, "from") if channel.target == self._mesh.node else (channel.target, "to")
        )
        rank = self._mesh.ranks[self._topology.leader_of(other)]
        return f"{label(action)} on channel {channel.name} {word} rank {rank}"

    def _channel(self, action: Action) -> Channel:
        return self._step.plan.channel_of(action, self._mesh.node)

    def _reap(self, work: CompositeWork, entry: Entry) -> bool:
        """Finish a send if it has completed. Returns whether it has."""
        if not work.is_completed():
            return False
        work.wait()  # raises if the send failed
        entry.end = self.recorder.now()
        self._in_flight_tensors.end(slot_of(entry.action))
        return True

    def _flush(self) -> None:
        start = self.recorder.now()
        for work, entry in itertools.chain.from_iterable(self._sends.values()):
            with self._progress.waiting(self._describe_message(entry.action)):
                work.wait()
            entry.end = self.recorder.now()
            self._in_flight_tensors.end(slot_of(entry.action))
        self._sends.clear()
        for grad_reduction in self._grad_reductions:
            grad_reduction.finish()
        self._grad_reductions.clear()
        self.recorder.flushing += self.recorder.now() - start


_METHODS: dict[Kind, Callable[[Executor, Action, Entry], None]] = {
    Kind.F: Executor._forward,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward_input,
    Kind.W: Executor._backward_weight,
    Kind.SEND_F: Executor._send,
    Kind.SEND_B: Executor._send,
    Kind.RECV_F: Executor._receive,
    Kind.RECV_B: Executor._receive,
    Kind.REDUCE_GRAD: Executor._reduce,
}
