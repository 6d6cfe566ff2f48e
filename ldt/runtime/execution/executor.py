"""Runs one row of a plan: a table from action kind to method, and nothing that knows a schedule."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ldt.errors import LdtError
from ldt.plan import Action, Kind
from ldt.plan.checks.error_context import excerpt
from ldt.runtime.comm.transfer import CompositeWork
from ldt.runtime.common.chunk_outputs import check_device
from ldt.runtime.common.tensor_spec import HopSpecs, TensorSpec, backward_specs, first_difference, specs_of
from ldt.runtime.execution.absent_grads import AbsentGrads, with_absent, without_absent
from ldt.runtime.execution.chunk_runner import ChunkRunner
from ldt.runtime.execution.grad_memory import GradMemory
from ldt.runtime.execution.grad_reduce import GradReduction, refuse_sparse_gradient
from ldt.runtime.execution.in_flight import InFlightTensors, overlapping, own_memory
from ldt.runtime.execution.recorder import Entry, Recorder
from ldt.runtime.execution.run_ahead import RunAheadLimit
from ldt.runtime.execution.stash import ActivationStash, Slot, Stashed
from ldt.runtime.execution.step_state import StepState
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.audit import Audit
from ldt.topology import Channel, Direction

__all__ = ["Executor"]

logger = logging.getLogger(__name__)

BackwardOf = Callable[[StepState, int, Sequence[torch.Tensor | None]], list[torch.Tensor | None]]


class Executor:
    """Runs this node's row of a plan over the mesh's lanes. One instance per step."""

    def __init__(
        self,
        mesh: Mesh,
        runners: Mapping[int, ChunkRunner],
        step: StepState,
        recorder: Recorder | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._mesh = mesh
        self._topology = mesh.topology
        self._runners = runners
        self._work = step
        self._stash = ActivationStash()
        self._outbox: dict[Slot, list[torch.Tensor]] = {}
        self._run_ahead = RunAheadLimit(mesh.device, mesh.watchdog)
        self._sends: dict[Channel, deque[tuple[CompositeWork, Entry]]] = {}
        self._in_flight_tensors = InFlightTensors()
        self._gradients = GradMemory()
        self._receives: dict[Slot, Entry] = {}
        self._local: dict[tuple[int, int], HopSpecs] = {}  # what local hops carried, by microbatch and hop
        self.traffic: dict[Channel, list[int]] = {}  # messages and bytes
        self.recorder = recorder or Recorder()
        self._audit = audit
        self.place = "the start of the row"
        self._progress = mesh.detector.progress
        self._index = 0
        self._grad_reductions: list[GradReduction] = []
        self._absent_grads = AbsentGrads({})
        self._last: dict[int, Action] = {}  # the last whole backward of each chunk

    def run(self) -> None:
        """Run the whole row. What a lane or a chunk raises passes through; ``place`` says where."""
        row = self._work.plan.rows[self._mesh.node]
        self._progress.begin(self._work.plan)
        self._last = {action.chunk: action for action in row if action.kind is Kind.B}
        self._absent_grads = AbsentGrads(
            Counter(action.chunk for action in row if action.kind in (Kind.B, Kind.I))
        )
        try:
            for self._index, action in enumerate(row):
                self._stand(f"action {action} ({self._index + 1} of {len(row)}): {_words(action)}")
                if action.kind.is_compute:
                    with self._progress.waiting("its device, which is some actions behind"):
                        self._run_ahead.keep()
                with self.recorder.action(action) as entry, torch.profiler.record_function(f"ldt {action}"):
                    _METHODS[action.kind](self, action, entry)
                if action.kind.is_compute:
                    self._run_ahead.mark()
            self._index = len(row)
            self._stand("the end of its row: the last sends and reductions")
            self._flush()
        finally:
            self._stash.clear()
            self._outbox.clear()
            self._in_flight_tensors.clear()
        assert not any(runner.in_flight for runner in self._runners.values()), "a graph was left behind"

    def excerpt(self) -> str:
        """This node's row around the place where it stands, which is marked."""
        return excerpt(self._work.plan, {self._mesh.node: self._index})

    # -- one method per kind ---------------------------------------------------------------------------------

    def _forward(self, action: Action, entry: Entry) -> None:
        self._hand_over(action, *self._outputs(action, entry))

    def _backward(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].sync.set_last(action == self._last[action.chunk])
        self._run_backward(action, entry, self._runners[action.chunk].backward)
        self._separate_gradients(action.chunk)

    def _backward_input(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].sync.refuse_split(action.chunk)
        self._run_backward(action, entry, self._runners[action.chunk].backward_input)

    def _backward_weight(self, action: Action, entry: Entry) -> None:
        self._runners[action.chunk].backward_weight(self._work, _microbatch(action))
        self._separate_gradients(action.chunk)

    def _send(self, action: Action, entry: Entry) -> None:
        end = self._mesh.endpoints.get(self._channel(action))
        tensors = self._outbox.pop(_slot(action), None)
        if end is None or not tensors:
            return  # a rank that leaves sending to others of its node; or nothing on this hop
        earlier = self._sends.setdefault(self._channel(action), deque())
        while earlier and self._seen_done(*earlier[0]):  # asking costs, and on a channel later ones end later
            earlier.popleft()
        specs = self._carried(action.hop, action.kind.direction, _microbatch(action))
        wire = [spec.to_wire(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
        work = end.send(wire, _label(action), specs)
        if work is not None:
            self._count(action, specs)
            if self._audit is not None:
                purpose = "activation" if action.kind.direction == "F" else "gradient"
                channel = self._channel(action).name
                self._audit.write_tensors(purpose, self._work.serial, channel, _microbatch(action), tensors)
            earlier.append((work, entry))

    def _receive(self, action: Action, entry: Entry) -> None:
        slot = Slot(action.chunk, action.kind.direction, _microbatch(action))
        specs = self._carried(action.hop, slot.direction, slot.microbatch)
        if not specs:
            return
        end = self._mesh.endpoints[self._channel(action)]
        wire = end.buffers(specs, list(map(self._mesh.shards.local_shape, specs)), self._mesh.device)
        tensors = [spec.from_wire(buffer) for spec, buffer in zip(specs, wire, strict=True)]
        self._receives[slot] = entry
        self._count(action, specs)
        self._stash.put(slot, Stashed(tensors, end.receive(wire, _label(action), specs)))

    def _reduce(self, action: Action, entry: Entry) -> None:
        row = self._work.plan.rows[self._mesh.node]
        later = [other.chunk for other in row[self._index + 1 :] if other.kind is Kind.REDUCE_GRAD]
        parameters_of = {
            chunk: dict.fromkeys(parameter for _, parameter in runner.named_parameters())
            for chunk, runner in self._runners.items()
        }
        tied = {id(p) for chunk in later for p in parameters_of[chunk]}  # reduced once, with the last
        mine = [p for p in parameters_of[action.chunk] if id(p) not in tied]
        for grad_reduction in self._grad_reductions:  # so that those that are over give their memory back
            if grad_reduction.is_done:
                grad_reduction.finish()
        self._grad_reductions.append(
            GradReduction(mine, self._mesh, f"the gradients of chunk {action.chunk}")
        )

    # -- helpers ---------------------------------------------------------------------------------------------

    def _outputs(self, action: Action, entry: Entry) -> tuple[list[torch.Tensor], list[int]]:
        """What goes on to the next chunk, and the places of tensors without a graph, as those that modules keep."""
        chunk, microbatch = action.chunk, _microbatch(action)
        runner = self._runners[chunk]
        tensors = runner.forward(
            self._work,
            microbatch,
            self._arrived(Slot(chunk, "F", microbatch), entry),
            self._hop(chunk - 1, microbatch),
        )
        outputs = self._checked(tensors, chunk, microbatch)
        plain = [place for place, output in enumerate(outputs) if output.grad_fn is None]
        leaving = runner.leave(microbatch, outputs)
        self._compare(chunk, "F", microbatch, leaving)
        return leaving, plain

    def _run_backward(self, action: Action, entry: Entry, run: BackwardOf) -> None:
        self._hand_over(action, self._input_grads(action, entry, run))

    def _input_grads(self, action: Action, entry: Entry, run: BackwardOf) -> list[torch.Tensor | None]:
        chunk, microbatch = action.chunk, _microbatch(action)
        specs = self._hop(chunk, microbatch)
        grads = with_absent(specs, self._arrived(Slot(chunk, "B", microbatch), entry))
        found: list[Any] = run(self._work, microbatch, grads)
        if self._topology.crosses(chunk - 1):
            if self._work.guard is not None:
                given = [grad for grad in found if grad is not None]
                self._work.guard.check(
                    given, f"gradient of the input of chunk {chunk} for microbatch {microbatch}"
                )
            found = self._leaving(found, chunk, microbatch)
        self._compare(chunk - 1, "B", microbatch, found)
        return [None if grad is None else grad.detach() for grad in found]

    def _separate_gradients(self, chunk: int) -> None:
        of_chunk = (parameter for _, parameter in self._runners[chunk].named_parameters())
        for parameter in self._gradients.separate(chunk, of_chunk):
            refuse_sparse_gradient(parameter, self._mesh, f"the gradients of chunk {chunk}")

    def _compare(self, hop: int, direction: Direction, microbatch: int, tensors: list[Any]) -> None:
        """Raise LdtError on all ranks of the node where they are about to send different tensors as the same."""
        if self._work.divergence is not None and self._topology.crosses(hop):
            chunk = hop if direction == "F" else hop + 1
            what = "output" if direction == "F" else "gradient of the input"
            self._work.divergence.check(
                hop,
                direction,
                self._carried(hop, direction, microbatch),
                tensors,
                f"{what} of chunk {chunk} for microbatch {microbatch}",
            )

    def _leaving(
        self, found: Sequence[torch.Tensor | None], chunk: int, microbatch: int
    ) -> list[torch.Tensor]:
        """The message with the gradients of a chunk's inputs, as its receiver expects it."""
        wanted = [spec for spec in self._hop(chunk - 1, microbatch) if spec.requires_grad]
        self._absent_grads.note(chunk, microbatch, wanted, found)
        return without_absent(wanted, found, self._zeros, self._mesh.device)

    def _zeros(self, spec: TensorSpec) -> torch.Tensor:
        """In place of the gradient of an input that a chunk did not use for once: its sender waits for one."""
        shape = self._mesh.shards.local_shape(spec)
        return spec.from_wire(torch.zeros(shape, dtype=spec.dtype, device=self._mesh.device))

    def _hand_over(self, action: Action, tensors: list[Any], copied: Sequence[int] = ()) -> None:
        """What ``action`` made: to the next chunk on this node, or to the send that follows.

        The tensors are fresh from ``detach``, and nothing of the runtime holds their originals any more.
        """
        if not tensors:
            return
        direction: Direction = "F" if action.kind is Kind.F else "B"
        chunk = action.chunk + (1 if direction == "F" else -1)
        slot = Slot(chunk, direction, _microbatch(action))
        itself = overlapping(tensors) if direction == "F" else []
        shared = [*itself, *own_memory(tensors, copied)]
        aliasing = self._runners[action.chunk].aliasing
        if shared and direction == "F" and aliasing is not None:
            aliasing.shares(action.chunk, shared)
        self._in_flight_tensors.begin(slot, tensors)
        if self._topology.crosses(min(action.chunk, chunk)):
            self._outbox[slot] = tensors
        else:
            self._stash.put(slot, Stashed(tensors))

    def _arrived(self, slot: Slot, entry: Entry) -> Sequence[torch.Tensor]:
        """What came for ``slot``; waits for it if it is still under way."""
        hop = slot.chunk - 1 if slot.direction == "F" else slot.chunk
        if not self._carried(hop, slot.direction, slot.microbatch):
            return ()
        arrival = self._stash.take(slot)
        if slot.direction == "B":  # so the output is there, and the backward may write to what it was
            self._in_flight_tensors.end(Slot(slot.chunk + 1, "F", slot.microbatch))
        if arrival.work is None:
            self._in_flight_tensors.end(slot)
        else:
            start = self.recorder.now()
            receive = self._receives[slot].action
            with self._progress.waiting(self._description(receive), _label(receive)):
                arrival.work.wait()
            now = self.recorder.now()
            self.recorder.has_waited(entry, now - start)
            self._receives.pop(slot).end = now
        return arrival.tensors

    def _carried(self, hop: int, direction: Direction, microbatch: int) -> HopSpecs:
        """What a message holds: all tensors forward, backward the gradients of those that get one."""
        specs = self._hop(hop, microbatch)
        return specs if direction == "F" else backward_specs(specs)

    def _hop(self, hop: int, microbatch: int) -> HopSpecs:
        """What a hop carries; nothing before the first and after the last chunk."""
        if self._topology.crosses(hop):
            return self._work.hops[microbatch][hop]
        return self._local.get((microbatch, hop), ())

    def _checked(self, tensors: Sequence[torch.Tensor], chunk: int, microbatch: int) -> list[torch.Tensor]:
        """What this rank has of a chunk's output. Raises before anything is sent that the receiver does not expect."""
        crosses = self._topology.crosses(chunk)
        what = f"output of chunk {chunk} for microbatch {microbatch}"
        specs = self._mesh.shards.specs_of(tensors, what) if crosses else specs_of(tensors)
        if not self._work.plan.training:
            # where a parameter that is passed on requires a gradient all the same
            specs = tuple(spec.without_grad() for spec in specs)
        if not crosses:
            self._local[microbatch, chunk] = specs
            return list(tensors)
        difference = first_difference(self._hop(chunk, microbatch), specs, self._runners[chunk].declares)
        if difference is not None:
            raise LdtError(f"{what} is not what was agreed: {difference}")
        check_device(tensors, self._mesh.device, what)
        parts = list(map(self._mesh.shards.local, tensors))
        if self._work.guard is not None:
            self._work.guard.check(parts, what)
        return parts

    def _count(self, action: Action, specs: HopSpecs) -> None:
        """A message with all its bytes, whichever of them go by this rank."""
        counts = self.traffic.setdefault(self._channel(action), [0, 0])
        counts[0] += 1
        counts[1] += sum(spec.nbytes for spec in specs)

    def _stand(self, place: str) -> None:
        """From here on this rank is at ``place``. Raises RemoteStageError if the mesh has failed."""
        self._mesh.watchdog.check()
        self.place = place
        self._progress.begin_action(place, self._index)
        logger.debug("%s", place)

    def _description(self, action: Action) -> str:
        """Of the message that ``action`` sends or receives, by channel, with the rank at the other end."""
        channel = self._channel(action)
        other, word = (
            (channel.source, "from") if channel.target == self._mesh.node else (channel.target, "to")
        )
        rank = self._mesh.ranks[self._topology.leader_of(other)]
        return f"{_label(action)} on channel {channel.name} {word} rank {rank}"

    def _channel(self, action: Action) -> Channel:
        return self._work.plan.channel_of(action, self._mesh.node)

    def _seen_done(self, work: CompositeWork, entry: Entry) -> bool:
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong
        entry.end = self.recorder.now()
        self._in_flight_tensors.end(_slot(entry.action))
        return True

    def _flush(self) -> None:
        start = self.recorder.now()
        for work, entry in itertools.chain.from_iterable(self._sends.values()):
            with self._progress.waiting(self._description(entry.action)):
                work.wait()
            entry.end = self.recorder.now()
            self._in_flight_tensors.end(_slot(entry.action))
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


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, action
    return action.microbatch


def _slot(action: Action) -> Slot:
    """Where what a send carries is used."""
    return Slot(action.counterpart.chunk, action.kind.direction, _microbatch(action))


def _label(action: Action) -> str:
    return f"{action.kind.direction}{action.hop} microbatch {action.microbatch}"


def _words(action: Action) -> str:
    where = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"chunk {action.chunk}{where}"
