"""Describes a job as data: its repr is Python source, and it can shrink piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from ldt.topology import Node, Topology

__all__ = ["Call", "Item", "Job"]


@dataclass(frozen=True)
class Item:
    """One part of a chunk, by class name; ``number`` selects its variant and seeds its weights."""

    kind: str
    number: int = 0


@dataclass(frozen=True)
class Call:
    """A call of all ranks: "step", "eval", "validate", "save", "load", "restart" (a load into new modules), or "thaw".

    "thaw" unfreezes all layers.
    ``batches`` are the rows of each microbatch of an edge replica. After a step the optimizer runs if it ``updates``,
    otherwise gradients stay. ``ahead`` announces the next step's microbatches. If it ``overflows``, a target
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
    """A model in chunks, a mesh to run it on, and the calls to make."""

    chunks: tuple[tuple[Item, ...], ...]
    calls: tuple[Call, ...]
    tp: tuple[int, ...] = (1, 1)
    dp: int = 1
    edge_dp: int = 1
    laps: int = 1
    lanes: str = "dedicated"
    transfer: str = "leader"
    plan: str = "ushape"  # "optimize" or "split" for random costs
    reduction: str = "mean"
    loss: str = "Squares"
    optimizer: str = "sgd"
    frozen: tuple[int, ...] = ()  # chunks
    ties: tuple[tuple[int, int], ...] = ()  # chunks that share a layer, appended to both
    torn: str = ""  # the second chunk has a "copy" of the layer, or "other", a layer with its own weights
    names: bool = False  # chunks provide names in the whole model
    begin: str = "equal"  # "unequal": cloud ranks begin with their own weights; "synced": these are broadcast
    clips: bool = False
    scales: bool = False  # the loss, with a GradScaler
    autocasts: bool = False  # to bfloat16
    inputs: str = "tensor"  # or "dict", some of which are metadata for the cloud
    shares_buffers: bool = True  # sync_buffers
    wraps: bool = False  # chunks in DistributedDataParallel
    slow: bool = False  # with slow_lanes
    seed: int = 0

    @property
    def topology(self) -> Topology:
        return Topology(self.tp, dp=self.dp, edge_dp=self.edge_dp, laps=self.laps)

    @property
    def mesh_config(self) -> tuple[object, ...]:
        """The mesh config, which jobs on one mesh share."""
        return self.tp, self.dp, self.edge_dp, self.laps, self.lanes, self.transfer

    def has(self, *kinds: str) -> bool:
        """Whether a chunk has a part of one of ``kinds``."""
        return any(item.kind in kinds for chunk in self.chunks for item in chunk)

    def variation_of(self, stage: int, rank: int) -> int:
        """Return the variation of a rank's initial weights; equal numbers mean equal weights."""
        return 0 if stage == 0 or self.begin == "equal" else 2 + rank

    def freezes(self, chunk: int) -> bool:
        """Whether the chunk is never unfrozen."""
        return chunk in self.frozen and all(call.kind != "thaw" for call in self.calls)

    def seed_of(self, node: Node) -> int:
        """Return the seed of the random generators of a node's ranks."""
        return 1000 * self.seed + 10 * node.stage + node.replica
