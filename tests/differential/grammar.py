"""Draws a random job from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from differential.known import OFF
from differential.spec import Call, Item, Job
from ldt.topology import Topology

__all__ = ["draw"]

_TOPOLOGIES: tuple[dict[str, object], ...] = (
    {"tp": (1,)},
    {"tp": (1, 1)},
    {"tp": (1, 1)},
    {"tp": (1, 1)},
    {"tp": (1, 1), "laps": 2},
    {"tp": (1, 1, 1)},
    {"tp": (1, 1, 1)},
    {"tp": (1, 1, 1), "laps": 2},
    {"tp": (1, 2)},
    {"tp": (2, 1)},
    {"tp": (2, 2)},
    {"tp": (1, 1), "dp": 2, "edge_dp": 2},
    {"tp": (1, 1), "dp": 2, "edge_dp": 1},
)
_WEIGHTS = {
    "Affine": 6,
    "Mlp": 6,
    "Single": 2,
    "Complex": 2,
    "Scale": 3,
    "Position": 5,
    "Views": 4,
    "InPlace": 3,
    "Twice": 2,
    "Checkpointed": 3,
    "Unused": 1,
    "Emit": 6,
    "Branch": 3,
    "Absorb": 6,
    "Drop": 2,
    "Alias": 1,
    "EmitOwn": 2,
    "Detach": 1,
    "OddDetach": 1,
    "StaticOutput": 1,
    "Memory": 2,
    "Cache": 2,
    "RunningMean": 2,
    "KeptOutput": 2,
    "MovedWeight": 1,
    "Dropout": 2,
    "LayerDrop": 2,
    "Custom": 2,
    "Accumulates": 2,
    "Tally": 1,
    "ForwardHook": 2,
    "ModuleHook": 1,
    "Uneven": 2,
    "Parallel": 2,
    "TensorHook": 2,
    "GradHook": 1,
    "PostHook": 1,
}
_RANDOM = {
    "Dropout",
    "LayerDrop",
    "Checkpointed",
}  # only one chunk of a stage draws, so that it draws in the order of microbatches
# The end of a chunk, and the beginning of a later one: pairs that rarely meet by chance.
_OVER_A_HOP = (
    ("Alias", "InPlace"),
    ("Alias", "Unused", "InPlace"),
    ("Detach", "LayerDrop", "Affine"),
    ("Views", "InPlace"),
    ("Branch", "Drop"),
    ("Emit", "Drop"),
    ("Emit", "Absorb"),
    ("EmitOwn", "Absorb"),
    ("KeptOutput", "Absorb"),
    ("MovedWeight", "Absorb"),
    ("StaticOutput", "Mlp"),
    ("Affine", "Position"),
    ("Mlp", "Detach"),
    ("Accumulates", "Accumulates"),
    ("Uneven", "Affine"),
)
_OPTIMIZERS = ("sgd", "momentum", "adamw", "groups", "adagrad", "rmsprop")
_FIRST = ("Affine", "Mlp")  # the edge must not send the sample's own memory
_TRIES = 1000
Chunks = tuple[tuple[Item, ...], ...]


def draw(seed: int, *, everything: bool = False) -> Job:
    """Draw the job of a seed, equal in every process. With ``everything`` also draw what is known not to work."""
    for attempt in range(_TRIES):
        job = _draw(random.Random(f"{seed} {attempt}"), seed)
        if everything or not any(off.holds(job) for off in OFF):
            return job
    raise AssertionError(f"seed {seed}: {_TRIES} jobs in a row are switched off")


def _draw(numbers: random.Random, seed: int) -> Job:
    shape = numbers.choice(_TOPOLOGIES)
    topology = Topology(**shape)  # type: ignore[arg-type]
    plan = numbers.choice(["ushape", "ushape", "optimize", "split", "split"])
    most = 3 if topology.laps == 2 and plan != "ushape" else 4
    chunks = _chunks(numbers, topology)
    scales = numbers.random() < 0.15
    return Job(
        chunks=chunks,
        calls=_calls(numbers, most, scales),
        **shape,  # type: ignore[arg-type]
        lanes=numbers.choice(["dedicated", "dedicated", "paired"]),
        transfer=numbers.choice(["leader", "scatter", "direct", "auto"])
        if max(topology.tp) > 1
        else "leader",
        plan=plan,
        reduction=numbers.choice(["mean", "mean", "token"]),
        loss=numbers.choices(["Squares", "Weighted", "Hidden"], [0.82, 0.14, 0.04])[0],
        optimizer=numbers.choice(_OPTIMIZERS),
        frozen=_frozen(numbers, topology),
        ties=_ties(numbers, topology, chunks),
        torn=numbers.choice(["", "", "", "copy", "other"]),
        names=numbers.random() < 0.25,
        begin=_begin(numbers, topology),
        clips=numbers.random() < 0.2,
        scales=scales,
        autocasts=numbers.random() < 0.15,
        inputs="dict" if numbers.random() < 0.2 else "tensor",
        shares_buffers=numbers.random() < 0.7,
        wraps=topology.dp > 1 and numbers.random() < 0.3,
        slow=numbers.random() < 0.4,
        seed=seed,
    )


def _chunks(numbers: random.Random, topology: Topology) -> Chunks:
    draws = {stage: numbers.choice(topology.chunks_of(stage)) for stage in range(topology.num_stages)}
    chunks = [
        _chunk(numbers, index, topology, draws[topology.stage_of(index)] == index)
        for index in range(topology.num_chunks)
    ]
    if numbers.random() < 0.6:
        _put_over_a_hop(numbers, chunks, topology, draws)
    return tuple(chunks)


def _put_over_a_hop(
    numbers: random.Random,
    chunks: list[tuple[Item, ...]],
    topology: Topology,
    draws: dict[int, int],
) -> None:
    """Put parts at the end of a chunk and the beginning of a later one; chunks in between become one part each."""
    first, *between, last = numbers.choice([kinds for kinds in _OVER_A_HOP if len(kinds) <= len(chunks)])
    hop = numbers.randrange(len(chunks) - 1 - len(between))
    numbered = partial(Item, number=numbers.randrange(60))
    fit = [
        _fits(kind, index, topology, draws[topology.stage_of(index)] == index)
        for index, kind in enumerate((first, *between), hop)
    ]
    if not all(fit) or _is_static(chunks[hop]):
        return
    chunks[hop] = (*chunks[hop], numbered(first))
    for index, kind in enumerate(between, hop + 1):
        chunks[index] = (numbered(kind),)
    after = hop + 1 + len(between)
    chunks[after] = (numbered(last), *chunks[after])


def _is_static(chunk: tuple[Item, ...]) -> bool:
    """Whether no part may follow."""
    return any(item.kind == "StaticOutput" for item in chunk)


def _chunk(numbers: random.Random, index: int, topology: Topology, draws: bool) -> tuple[Item, ...]:
    wanted = numbers.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=numbers.choice([1, 2, 2, 3, 4]))
    kinds = [kind for kind in wanted if _fits(kind, index, topology, draws)]
    if "StaticOutput" in kinds:  # a following part would save its memory for the backward
        kinds = [kind for kind in kinds if kind != "StaticOutput"] + ["StaticOutput"]
    if index == 0:
        kinds.insert(0, numbers.choice(_FIRST))
    return tuple(Item(kind, numbers.randrange(60)) for kind in kinds)


def _fits(kind: str, index: int, topology: Topology, draws: bool) -> bool:
    if kind in _RANDOM:
        return draws
    if kind == "StaticOutput":
        return topology.crosses(index)
    if kind == "Uneven":
        return index != topology.tail and topology.tp[topology.stage_of(index)] > 1
    return kind != "KeptOutput" or index != topology.tail


def _begin(numbers: random.Random, topology: Topology) -> str:
    alike = max(topology.dp, *topology.tp[1:], 1)
    return numbers.choice(["unequal", "synced"]) if alike > 1 and numbers.random() < 0.15 else "equal"


def _frozen(numbers: random.Random, topology: Topology) -> tuple[int, ...]:
    if numbers.random() > 0.2:
        return ()
    return tuple(index for index in range(topology.num_chunks) if numbers.random() < 0.5)


def _ties(numbers: random.Random, topology: Topology, chunks: Chunks) -> tuple[tuple[int, int], ...]:
    """Tie mostly chunks of one stage; after a StaticOutput no layer may keep its input."""
    if numbers.random() > 0.15:
        return ()
    pairs = [(c, c + topology.num_stages) for c in range(topology.num_chunks - topology.num_stages)]
    if numbers.random() < 0.25:
        pairs = [(first, second) for second in range(topology.num_chunks) for first in range(second)]
    static = {index for index, chunk in enumerate(chunks) if _is_static(chunk)}
    pairs = [pair for pair in pairs if not static & set(pair)]
    return (numbers.choice(pairs),) if pairs else ()


def _calls(numbers: random.Random, most: int, scales: bool) -> tuple[Call, ...]:
    kinds = ["step", *numbers.choice(_SEQUENCES)]
    calls = []
    for kind, following in zip(kinds, [*kinds[1:], ""], strict=True):
        if kind not in ("step", "eval", "validate"):
            calls.append(Call(kind))
            continue
        ahead = kind == following == "step" and numbers.random() < 0.4
        overflows = scales and kind == "step" and numbers.random() < 0.3
        quiet = kind != "step" and numbers.random() < 0.4
        updates = numbers.random() < 0.8
        calls.append(Call(kind, _batches(numbers, most), updates, ahead, overflows, quiet))
    return tuple(calls)


_SEQUENCES: Sequence[Sequence[str]] = (
    ("step",),
    ("step", "step"),
    ("eval", "step"),
    ("eval", "step", "eval"),
    ("validate", "step"),
    ("thaw", "step"),
    ("save", "step", "load", "step"),
    ("save", "restart", "step"),
    ("step", "save", "eval", "load", "step"),
)


def _batches(numbers: random.Random, most: int) -> tuple[int, ...]:
    number, rows = numbers.randint(1, most), numbers.choice([1, 1, 2, 3])
    if numbers.random() < 0.3:
        return tuple(numbers.choice([1, 2, 3]) for _ in range(number))
    return (rows,) * number
