"""Agrees on what chunks return for new inputs: one exchange in a call, whatever the number of chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ldt.errors import LdtError
from ldt.runtime.common.peer_messages import as_str_list, parse, read_or_raise
from ldt.runtime.common.tensor_spec import TensorSpec, describe
from ldt.runtime.control.edge_messages import EdgeMessage, Subject
from ldt.runtime.dry_run.grad_flow import InferredOutputs, Reach
from ldt.runtime.mesh.mesh import Mesh
from ldt.runtime.step.audit import Audit
from ldt.runtime.step.call import Call
from ldt.runtime.step.shape_walk import Query, ShapeWalk
from ldt.topology import Node

__all__ = ["ShapeExchange"]

Place = tuple[int, int]  # edge replica, number of the microbatch
Answers = list[Any]  # as JSON: of each chunk from the first that has new queries, in the order of its queries


class ShapeExchange:
    """The exchange of one call, between all ranks. Takes ``walks``, one for each edge replica, behind the last chunk.

    The stage of the first chunk with new queries infers its outputs and passes them to the next stage, which can then
    infer its own, and so on to the edge, which broadcasts all of them. So the link between two sites is crossed once in
    each direction, in each lap. All ranks of a stage infer, and compare with what its first leader says; on the edge
    only those of the replica that has the microbatch.

    Args:
        mesh: The mesh of the pipeline.
        call: The call.
        audit: Gets a line about what the edge sends.
        walks: At their first chunk.
        known: Returns the answer to a query if it is known, which is so on all ranks or on none.
        infer: Returns this rank's answer to a query about one of its chunks, for the microbatch at a place.
    """

    def __init__(
        self,
        mesh: Mesh,
        call: Call,
        audit: Audit | None,
        walks: Sequence[ShapeWalk],
        known: Callable[[Query], InferredOutputs | None],
        infer: Callable[[Query, Place], InferredOutputs],
    ) -> None:
        self._mesh = mesh
        self._call = call
        self._audit = audit
        self._walks = walks
        self._known = known
        self._infer = infer
        self._own: dict[Query, InferredOutputs] = {}
        self._answers: Answers = []
        self._sender = mesh.global_rank  # of the answers
        self._first = mesh.topology.num_chunks  # chunk with new queries

    def run(self) -> dict[Query, InferredOutputs]:
        """Agree. Return all queries of the call in order, each once, with their answers."""
        topology = self._mesh.topology
        found: dict[Query, InferredOutputs] = {}
        while self._chunk < topology.num_chunks and not self._new():
            found |= self._advance()
        self._first = self._chunk
        for chunk in range(self._first, topology.num_chunks):
            if topology.stage_of(chunk) == self._mesh.stage:
                while self._chunk < chunk:
                    found |= self._advance()
                self._answers.append([answer.to_json() for answer in self._own_answers()])
            self._pass_on(chunk)
        while self._chunk < topology.num_chunks:
            found |= self._advance()
        return found

    # -- queries ---------------------------------------------------------------------------------------------

    @property
    def _chunk(self) -> int:
        return self._walks[0].chunk

    def _new(self) -> dict[Query, Place]:
        """Return the new queries of the next chunk, with the first microbatch that has each."""
        new: dict[Query, Place] = {}
        for replica, walk in enumerate(self._walks):
            for index, query in enumerate(walk.queries):
                if self._known(query) is None:
                    new.setdefault(query, (replica, index))
        return new

    def _own_answers(self) -> list[InferredOutputs]:
        """Infer this rank's answers to the new queries of the next chunk."""
        for query, place in self._new().items():
            if not self._mesh.is_edge or place[0] == self._mesh.replica:
                self._own[query] = self._infer(query, place)
        return [self._own[query] for query in self._new() if query in self._own]

    def _advance(self) -> dict[Query, InferredOutputs]:
        """Take the walks behind the next chunk. Return its queries with their answers."""
        new = self._new()
        agreed: dict[Query, InferredOutputs] = {}
        if self._chunk >= self._first:
            read = partial(_parse_outputs, list(new))
            answers = read_or_raise(self._answers[self._chunk - self._first], read, f"rank {self._sender}")
            agreed = dict(zip(new, answers, strict=True))
            self._compare(agreed)
        queries = [query for walk in self._walks for query in walk.queries]
        found = {query: agreed.get(query) or self._known(query) for query in queries}
        for walk in self._walks:
            walk.advance([found[query] for query in walk.queries])  # type: ignore[misc]
        return found  # type: ignore[return-value]

    def _compare(self, agreed: Mapping[Query, InferredOutputs]) -> None:
        for query, (leaders, _, _, losses) in agreed.items():
            mesh, mine = self._mesh, self._own.get(query)
            own = leaders if mine is None else mine.specs
            if mine is not None and mine.losses != losses:
                raise LdtError(
                    f"the ranks of stage {mesh.stage} disagree on the auxiliary losses of chunk {query.chunk}: its "
                    f"leader adds {', '.join(losses) or 'none'}, rank {mesh.ranks[mesh.rank]} "
                    f"{', '.join(mine.losses) or 'none'}; they must hold equal modules"
                )
            if own != leaders:
                layouts = ", in another memory layout" if describe(own) == describe(leaders) else ""
                raise LdtError(
                    f"the ranks of stage {mesh.stage} disagree on what chunk {query.chunk} returns: its leader says "
                    f"{describe(leaders)}, rank {mesh.ranks[mesh.rank]} says {describe(own)}{layouts}; "
                    "they must hold equal modules, and what random numbers or a state decide needs an output_spec"
                )

    # -- messages --------------------------------------------------------------------------------------------

    def _pass_on(self, chunk: int) -> None:
        """Pass the answers up to ``chunk`` from its stage to the next one, from the edge to all ranks."""
        mesh, topology = self._mesh, self._mesh.topology
        stage, messages = topology.stage_of(chunk), mesh.edge_broadcast
        data = json.dumps(self._answers, separators=(",", ":")).encode()
        message = EdgeMessage(Subject.SHAPES, self._call.number, data)
        if stage == 0:
            if mesh.is_edge and mesh.is_leader:
                messages.send(message)
                if self._audit is not None:
                    self._audit.write("metadata", self._call.serial, message.nbytes)
            received = messages.receive(Subject.SHAPES)
            senders = [
                mesh.ranks[topology.leader_of(Node(0, replica))] for replica in range(topology.edge_dp)
            ]
            parts = [self._read(*pair, chunk) for pair in zip(received, senders, strict=True)]
            self._answers = [*parts[0][:-1], [answer for part in parts for answer in part[-1]]]
            self._sender = senders[0]
            return
        target, chain = topology.stage_of(chunk + 1), messages.chain
        if stage == mesh.stage:
            chain.send(message, target)
        if target == mesh.stage:
            self._sender = chain.source(stage)
            self._answers = self._read(chain.receive(stage, message), self._sender, chunk)

    def _read(self, message: EdgeMessage, sender: int, chunk: int) -> Answers:
        """Return the answers in a message. Raises LdtError if it is about another call or malformed."""
        if message.number != self._call.number:
            raise LdtError(
                f"expected shapes of hops of call {self._call.serial}, got those of call "
                f"{message.number & 0xFFFFFFFF} from rank {sender}: every rank must make the same calls in the same "
                "order"
            )
        number = chunk - self._first + 1

        def read(content: bytes) -> Answers:
            answers = parse(content)
            if not isinstance(answers, list) or [type(part) for part in answers] != [list] * number:
                raise ValueError(f"expected the answers of {number} chunks")
            return answers

        return read_or_raise(message.content, read, f"rank {sender}")


def _parse_outputs(queries: Sequence[Query], value: Any) -> list[InferredOutputs]:
    """Parse the results of another rank. Raises ValueError if they do not answer the queries."""
    answers = [
        InferredOutputs(
            tuple(map(TensorSpec.from_json, specs)),
            _reaches(reaches),
            tuple(map(int, reentrant)),
            tuple(as_str_list(losses)),
        )
        for specs, reaches, reentrant, losses in value
    ]
    if len(answers) != len(queries):
        raise ValueError(f"expected the specs of {len(queries)} microbatches, got {len(answers)}")
    for query, answer in zip(queries, answers, strict=True):
        numbers = {*answer.reentrant, *(i for reach in answer.reaches for numbers in reach for i in numbers)}
        outputs = len(answer.specs) or len(answer.reaches)  # the last chunk has no specs
        if not numbers <= set(range(len(query.inputs))) or len(answer.reaches) != query.training * outputs:
            raise ValueError(
                "expected the numbers of the inputs that each output reaches, got invalid numbers"
            )
    return answers


def _reaches(value: Any) -> tuple[Reach, ...]:
    return tuple(Reach(*(tuple(map(int, numbers)) for numbers in reach)) for reach in value)
