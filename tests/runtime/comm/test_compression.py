"""A step and an eval with compression equal an unsplit model that rounds at the same places, bit for bit."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compression_jobs import WIDTH, Traffic, compare_with_rounding
from pipeline_jobs import build
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import ldt
import ldt.plan
from ldt.runtime.comm.compression import Compressions
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.testing.late_sends import each_kind_at_once
from ldt.topology import Topology

WORLD_SIZE = 5
MIXED = ldt.Compression(activations="8bit", gradients="bf16")
CPU = torch.device("cpu")


def with_options(topology: Topology, choice: Any, options: dict[str, Any]) -> None:
    compare_with_rounding(topology, choice, **options)


CASES: list[tuple[list[int], int, dict[str, Any]]] = [
    ([1, 1], 1, {}),
    ([1, 1, 1], 1, {"lanes": "paired"}),
    ([1, 1, 1], 2, {}),
    ([1, 3, 1], 1, {}),
    ([2, 2], 1, {"transfer": "scatter"}),
    ([2, 3], 2, {"transfer": "scatter"}),
    ([2, 2], 1, {"transfer": "direct"}),
    ([2, 2], 1, {"transfer": "auto"}),
]


@pytest.mark.parametrize(
    ("tp", "laps", "options", "choice"),
    [  # `make slow` runs every other one
        pytest.param(*case, choice, marks=[pytest.mark.slow] if (row + column) % 2 else [])
        for row, case in enumerate(CASES)
        for column, choice in enumerate(["8bit", {(0, 1): MIXED}, "bf16"])
    ],
    ids=str,
)
def test_steps_and_evals_equal_an_unsplit_model_that_rounds(
    pool: RankPool, tp: list[int], laps: int, options: dict[str, Any], choice: Any
) -> None:
    topology = Topology(tp, laps=laps)
    pool.run(with_options, topology, choice, options, ranks=range(sum(tp)))


def split_backward(choice: str) -> None:
    topology = Topology([1, 1, 1])
    compare_with_rounding(topology, choice, 4, plan=each_kind_at_once(topology, 4, split_backward=True))


@pytest.mark.parametrize("choice", ["bf16", "8bit"])
def test_split_backward(pool: RankPool, choice: str) -> None:
    pool.run(split_backward, choice, ranks=range(3))


def bytes_sent(choice: Any) -> Traffic:
    return compare_with_rounding(Topology([1, 1, 1]), choice)


@pytest.mark.parametrize(
    ("choice", "up", "down"),
    [("bf16", 480, 480), ("8bit", 244, 244), ({(1, 0): MIXED}, 244, 480)],
    ids=str,
)
def test_counts_are_of_the_wire_and_links_within_a_site_pack_nothing(
    pool: RankPool, choice: Any, up: int, down: int
) -> None:
    edge, middle, last = pool.run(bytes_sent, choice, ranks=range(3))
    other = 960 if isinstance(choice, dict) else up
    by_channel = {name: nbytes // messages for name, (messages, nbytes) in (edge | middle | last).items()}
    sizes = sorted(by_channel.values())
    assert sizes == sorted([up, down, 960, 960, other, 960 if isinstance(choice, dict) else down])


class WithExtras(nn.Module):
    """Its output has tensors that are not packed, in odd layouts, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *extras: Tensor) -> tuple[Tensor, ...]:
        if extras:
            transposed, table, ids, double, empty, half = extras
            assert transposed.stride() == (1, 6)
            if type(x) is Tensor:  # not during shape inference
                assert torch.equal(table, torch.full((7,), 0.1))
                assert ids.tolist() == [[1, 2]]
            assert empty.shape == (0, 5)
            x = x + transposed + double.float() + half.float() + empty.sum()
        y = self.linear(x)
        columns = (y * 2).t().contiguous().t()
        table, ids = torch.full((7,), 0.1), torch.tensor([[1, 2]])
        return y, columns, table, ids, y.double(), y.new_zeros(0, 5) * y.sum(), y.to(torch.bfloat16)


class Ending(WithExtras):
    def forward(self, x: Tensor, *extras: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, *extras)[0]


def chunks_with_extras(topology: Topology) -> list[nn.Module]:
    torch.manual_seed(0)
    return [WithExtras(), WithExtras(), Ending()]


def extras(choice: str) -> None:
    compare_with_rounding(Topology([1, 1]), choice, 2, make=chunks_with_extras)


@pytest.mark.parametrize("choice", ["bf16", "8bit"])
def test_tensors_arrive_with_their_layout_and_others_as_they_are(pool: RankPool, choice: str) -> None:
    pool.run(extras, choice, ranks=range(2))


class Rows(nn.Module):
    """Splits the rows of its output over the ranks of its stage; the tail gathers them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mesh: ldt.Mesh | None = None
        self.is_tail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return torch.tanh(self.linear(x))
        if not isinstance(x, DTensor):
            whole = DTensor.from_local(torch.tanh(self.linear(x)), self.mesh.tp_mesh, [Replicate()])
            return whole.redistribute(placements=[Shard(0)])
        part = torch.tanh(self.linear(x.to_local()))
        y = DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        return y.full_tensor() if self.is_tail else y


def shards(tp: list[int], transfer: str, choice: str) -> None:
    torch.manual_seed(0)
    topology = Topology(tp)
    chunks = [Rows() for _ in range(topology.num_chunks)]
    chunks[-1].is_tail = True
    batch = toy_microbatches(2, WIDTH, batch=7)
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    ranks = range(topology.world_size)
    with ldt.connect(topology, compression=choice, transfer=transfer, ranks=ranks) as mesh:  # type: ignore[arg-type]
        mine = copy.deepcopy([chunks[index] for index in topology.chunks_of(mesh.stage)])
        for chunk in mine:
            chunk.mesh = mesh
        pipeline = ldt.Pipeline(mine, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        result = pipeline.step(batch if mesh.is_edge else None)
        if mesh.is_edge:
            torch.testing.assert_close(result.losses, losses, rtol=0.02, atol=0.0)
        for index, chunk in zip(topology.chunks_of(mesh.stage), mine, strict=True):
            for parameter, theirs in zip(chunk.parameters(), reference[index].parameters(), strict=True):
                assert parameter.grad is not None
                grad = parameter.grad.clone()
                if index > 0:  # only this rank's rows
                    dist.all_reduce(grad, group=mesh.tp_mesh.get_group())
                assert theirs.grad is not None
                assert (grad - theirs.grad).norm() < 0.1 * theirs.grad.norm()
                assert not torch.equal(grad, theirs.grad)


@pytest.mark.parametrize("choice", ["bf16", "8bit"])
@pytest.mark.parametrize("transfer", ["direct", "auto"])
@pytest.mark.parametrize("tp", [[2, 2], [2, 3], [1, 4]], ids=str)
def test_shards_are_packed_piece_by_piece(pool: RankPool, tp: list[int], transfer: str, choice: str) -> None:
    pool.run(shards, tp, transfer, choice, ranks=range(sum(tp)))


def audited(path: str) -> None:
    topology = Topology([1, 1])
    chunks = toy_chunks(topology, WIDTH)
    with ldt.connect(topology, compression={(0, 1): MIXED}, ranks=range(2)) as mesh:
        pipeline = build(mesh, chunks, audit=path)
        pipeline.step(toy_microbatches(1, WIDTH, batch=6) if mesh.is_edge else None)


def test_an_audit_has_bytes_on_the_wire_and_the_scheme(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    pool.run(audited, str(path), ranks=range(2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["purpose"]: line for line in lines if line["purpose"] in ("activation", "gradient")}
    assert {name: (line["bytes"], line["compression"], line["shape"]) for name, line in found.items()} == {
        "activation": (244, "8bit", [6, WIDTH]),
        "gradient": (480, "bf16", [6, WIDTH]),
    }


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warned(choice: str) -> list[str]:
    topology = Topology([1, 1, 1])
    chunks = [nn.Sequential(chunk, nn.LayerNorm(WIDTH)) for chunk in toy_chunks(topology, WIDTH)]
    messages = Messages()
    logger = logging.getLogger("ldt.runtime.step.compression_advice")
    logger.addHandler(messages)
    batch = toy_microbatches(2, WIDTH)
    with ldt.connect(topology, compression=choice, ranks=range(3)) as mesh:  # type: ignore[arg-type]
        pipeline = build(mesh, chunks)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipeline.step(batch if mesh.is_edge else None)
        pipeline.step(batch if mesh.is_edge else None)
    logger.removeHandler(messages)
    return messages.texts


def test_float32_under_autocast_is_named_once_by_hop_on_the_edge(pool: RankPool) -> None:
    edge, *cloud = pool.run(warned, "none", ranks=range(3))
    assert [text[:30] for text in edge] == [
        "hop 0->1 carries float32 under",
        "hop 2->3 carries float32 under",
    ]
    assert all('compression="bf16"' in text for text in edge)
    assert cloud == [[], []]
    assert pool.run(warned, "bf16", ranks=range(3)) == [[], [], []]


def unequal() -> str:
    topology = Topology([1, 1])
    choice = "8bit" if dist.get_rank() == 0 else "bf16"
    with pytest.raises(ldt.LdtError) as caught:
        ldt.connect(topology, compression=choice, ranks=range(2))  # type: ignore[arg-type]
    return str(caught.value)


def test_unequal_settings_are_refused_by_name(pool: RankPool) -> None:
    for text in pool.run(unequal, ranks=range(2)):
        assert "compression" in text
        assert "8bit" in text
        assert "bf16" in text


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("fp8", "compression must be 'none', 'bf16' or '8bit'"),
        ({(0, 1): "8bit"}, "takes ldt.Compression"),
        ({(1, 2): MIXED}, "names a link (1, 2), but the links between sites of tp=1,1,1 dp=1 edge_dp=1"),
        ({(0, 1): MIXED, (1, 0): MIXED}, "names the link (0, 1) twice"),
    ],
    ids=str,
)
def test_wrong_choices(choice: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Compressions.of(Topology([1, 1, 1]), choice, CPU)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="'8bit' needs kernels"):
        Compressions.of(Topology([1, 1]), "8bit", torch.device("meta"))
