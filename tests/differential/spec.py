"""What a job is, as data: it prints as the Python that makes it, and can be cut down piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from ldt.topology import Node, Topology

__all__ = ["Call", "Item", "Job"]


@dataclass(frozen=True)
class Item:
    """One part of a chunk, by the name of its class; ``number`` picks its variant and seeds its weights."""

    kind: str
    number: int = 0


@dataclass(frozen=True)
class Call:
    """A call of all ranks: "step", "eval", "validate", "save", "load", or "restart", a load into other modules.

    Or "thaw": what is frozen is trained from then on.
    ``batches`` are the rows of each microbatch of an edge replica. After a step the optimizer runs if it ``updates``,
    and gradients stay otherwise. ``ahead`` tells a step of the next one's microbatches. If it ``overflows``, a target
    is infinite, and so are gradients. While it is ``quiet``, modules are in eval mode.
    """

    kind: str
    batches: tuple[int, ...] = ()
    updates: bool = True
    ahead: bool = False
    overflows: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Job:
    """A model in chunks, a mesh to run it on, and the calls that are made."""

    chunks: tuple[tuple[Item, ...], ...]
    calls: tuple[Call, ...]
    tp: tuple[int, ...] = (1, 1)
    dp: int = 1
    edge_dp: int = 1
    laps: int = 1
    lanes: str = "dedicated"
    transfer: str = "leader"
    plan: str = "ushape"  # "optimize" or "split" for costs drawn from seed
    reduction: str = "mean"
    loss: str = "Squares"
    optimizer: str = "sgd"
    frozen: tuple[int, ...] = ()  # chunks
    ties: tuple[tuple[int, int], ...] = ()  # chunks that share a layer, put behind the other parts of both
    torn: str = (
        ""  # what the second one has in its place: "copy", or "other", a layer with weights of its own
    )
    names: bool = False  # chunks know what their tensors are called in the whole model
    begin: str = (
        "equal"  # "unequal": ranks of the cloud begin with weights of their own; "synced": and are sent one's
    )
    clips: bool = False
    scales: bool = False  # the loss, by a GradScaler
    autocasts: bool = False  # to bfloat16
    inputs: str = "tensor"  # or "dict", some of which the cloud gets as metadata
    shares_buffers: bool = True  # of the first replica with the others
    wraps: bool = False  # chunks in DistributedDataParallel
    slow: bool = False  # lanes
    seed: int = 0

    @property
    def topology(self) -> Topology:
        return Topology(self.tp, dp=self.dp, edge_dp=self.edge_dp, laps=self.laps)

    @property
    def mesh_terms(self) -> tuple[object, ...]:
        """What jobs that run on one mesh have in common."""
        return self.tp, self.dp, self.edge_dp, self.laps, self.lanes, self.transfer

    def has(self, *kinds: str) -> bool:
        """Whether a chunk has a part of one of ``kinds``."""
        return any(item.kind in kinds for chunk in self.chunks for item in chunk)

    def variation_of(self, stage: int, rank: int) -> int:
        """Which weights a rank begins with; equal numbers are equal weights."""
        return 0 if stage == 0 or self.begin == "equal" else 2 + rank

    def freezes(self, chunk: int) -> bool:
        """Whether it is frozen to the end."""
        return chunk in self.frozen and all(call.kind != "thaw" for call in self.calls)

    def seed_of(self, node: Node) -> int:
        """Of the random generators of a node's ranks."""
        return 1000 * self.seed + 10 * node.stage + node.replica
