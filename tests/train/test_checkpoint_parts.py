"""Each rank of a stage writes its own part: ranks exchange no pickles, and the parts form whole tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import Job, State, as_of_an_earlier_version, assert_equal_states, merged
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology
from ldt.train.checkpoint.stage_parts import tensors_of_rank

WORLD_SIZE = 5
SHAPE: dict[str, Any] = {"tp": [1, 2], "dp": 2, "edge_dp": 1}
UP = "model.blocks.3.up.weight"  # in shards, on the cloud


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("an object collective")


def without_objects(path: Path, shape: dict[str, Any], way: str) -> State:
    """Save and load, with every object collective of torch.distributed replaced by an error."""
    with Job(Topology(**shape), way) as job, pytest.MonkeyPatch.context() as patch:
        job.train([0])
        for module in (dist, distributed_c10d):
            for name in (
                name for name in dir(module) if "object" in name and callable(getattr(module, name))
            ):
                patch.setattr(module, name, refuse)
        with pytest.raises(AssertionError, match="an object collective"):
            dist.all_gather_object([None], 1)
        job.save(path, 1)
        state = job.state()
        job.train([1])
        assert job.load(path) == ldt.LoadedCheckpoint(1)
        assert_equal_states(job.state(), state)
        return state


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        (SHAPE, "plain"),
        (SHAPE, "fully_shard"),
        ({"tp": [1, 1], "dp": 4, "edge_dp": 1}, "fully_shard"),  # three elements, so that a shard is empty
        ({"tp": [1, 1], "dp": 2}, "ddp"),
    ],
)
def test_no_pickle_goes_from_rank_to_rank(
    pool: RankPool, tmp_path: Path, shape: dict[str, Any], way: str
) -> None:
    topology = Topology(**shape)
    states = pool.run(without_objects, tmp_path, shape, way, ranks=range(topology.world_size))
    pieces: list[tuple[str, Any]] = []
    for stage in range(topology.num_stages):
        folders = sorted((tmp_path / "step-1" / f"stage-{stage}").glob("rank-*"))
        assert len(folders) == len(topology.ranks_of_stage(stage))
        metadata = [pickle.loads((folder / ".metadata").read_bytes()) for folder in folders]
        pieces += [(index.fqn, index.offset) for part in metadata for index in part.storage_data]
    assert len(set(pieces)) == len(pieces), "nothing is written twice"
    expected = {name for name in merged(states) if " " not in name}
    assert {name.removeprefix("model.") for name, _ in pieces if name.startswith("model.")} == expected


def keys_of_part() -> set[str]:
    """Return the names of the tensors that this rank would write, of tensors distributed in every way."""
    with ldt.connect(Topology(**SHAPE)) as mesh:
        tensors: State = {"plain": torch.zeros(2)}
        if not mesh.is_edge:
            tensors |= {
                "over the node": distribute_tensor(torch.zeros(2), mesh.tp_mesh, [Shard(0)]),
                "on each of the node": distribute_tensor(torch.zeros(2), mesh.tp_mesh, [Replicate()]),
                "over replicas": distribute_tensor(torch.zeros(3), mesh.dp_mesh, [Shard(0)]),
                "of one element": distribute_tensor(torch.zeros(1), mesh.tp_mesh, [Shard(0)]),
                "of no element": distribute_tensor(torch.zeros(0), mesh.tp_mesh, [Shard(0)]),
            }
        keys = set(tensors_of_rank(mesh, tensors))
        mesh.control.all_gather(None)
        return keys


def test_which_rank_writes_what(pool: RankPool) -> None:
    edge, *cloud = pool.run(keys_of_part)
    assert edge == {"plain"}
    assert cloud == [
        {"plain", "over the node", "on each of the node", "over replicas", "of one element", "of no element"},
        {"over the node"},
        {"over replicas"},
        set(),
    ]


def saved(path: Path) -> None:
    with Job(Topology(**SHAPE), "fully_shard") as job:
        job.train([0])
        job.save(path, 1)


@pytest.fixture(scope="module")
def checkpoint(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    pool.run(saved, path)
    as_of_an_earlier_version(path)  # because the checksums would detect it first
    return path


def entry_of(metadata: Metadata, key: str = UP) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def other_type(metadata: Metadata) -> None:
    entry_of(metadata).properties.dtype = torch.float16


def other_size(metadata: Metadata) -> None:
    entry_of(metadata).size = torch.Size([36, 17])


def lacks_a_piece(metadata: Metadata) -> None:
    entry_of(metadata).chunks.clear()


def lacks_a_tensor(metadata: Metadata) -> None:
    del metadata.state_dict_metadata[UP]


def reaches_over(metadata: Metadata) -> None:
    piece = entry_of(metadata).chunks[0]
    piece.sizes = torch.Size([piece.sizes[0] + 1, piece.sizes[1]])


def a_scalar_again(metadata: Metadata) -> None:
    entry = entry_of(metadata, "model.blocks.3.forwards")
    entry.chunks *= 2


def no_metadata_of_a_piece(metadata: Metadata) -> None:
    metadata.storage_data = {}


def pieces_of_other_dimensions(metadata: Metadata) -> None:
    entry_of(metadata).chunks[0].sizes = torch.Size([9])


@pytest.mark.parametrize(
    ("rank", "change", "sentence"),
    [
        ("1.1", other_type, f"{UP} is ([36, 16], torch.float16, torch.strided) in rank-1.1, and ([36, 16], "),
        ("1.0", other_size, f"{UP} is ([36, 17], "),
        ("0.1", lacks_a_piece, f"the parts of its ranks do not have each element of {UP} once"),
        ("1.1", lacks_a_tensor, f"the parts of its ranks do not have each element of {UP} once"),
        ("0.0", reaches_over, f"the parts of its ranks do not have each element of {UP} once"),
        ("0.0", a_scalar_again, "each element of model.blocks.3.forwards once: it has no dimensions, and 2 "),
        ("0.1", no_metadata_of_a_piece, "rank-0.1/.metadata is damaged: KeyError"),
        ("0.1", pieces_of_other_dimensions, f"is damaged: TypeError: expected the sizes of {UP}"),
    ],
)
def test_parts_that_make_no_whole(
    checkpoint: Path, tmp_path: Path, rank: str, change: Callable[[Metadata], None], sentence: str
) -> None:
    file = checkpoint / "step-1" / "stage-1" / f"rank-{rank}" / ".metadata"
    before = file.read_bytes()
    metadata = pickle.loads(before)
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    try:
        with pytest.raises(ldt.LdtError) as caught:
            ldt.merge_checkpoint(checkpoint, tmp_path / "merged")
    finally:
        file.write_bytes(before)
    assert sentence in str(caught.value)
    assert str(file.parent.parent) in str(caught.value)


def test_a_part_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoint / "step-1" / "stage-1" / "rank-1.0"
    folder.rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(ldt.LdtError, match=r"cannot be read: No such file .*rank-1\.0/\.metadata"):
            ldt.merge_checkpoint(checkpoint, tmp_path / "merged")
    finally:
        (tmp_path / "elsewhere").rename(folder)
    assert ldt.merge_checkpoint(checkpoint, tmp_path / "merged") == 1


def other_names(path: Path) -> str:
    """One rank of the cloud has a buffer that the first rank of its stage lacks."""
    with Job(Topology(**SHAPE)) as job:
        if job.mesh.rank == 4:
            job.pipeline.chunks[0].register_buffer("own", torch.zeros(2))
        with pytest.raises(ldt.LdtError) as caught:
            job.save(path, 1)
        job.train([0])
        return str(caught.value)


def test_ranks_of_a_stage_have_tensors_of_the_same_names(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(other_names, tmp_path):
        assert "ranks 1 and 4 of stage 1 have tensors of different names" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("good", [True, False])
def test_what_torch_answers_up_to_2_11_is_understood(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    """Up to torch 2.11 the function returns whether a checkpoint is complete, later a list of errors."""
    monkeypatch.setattr(
        "torch.distributed.checkpoint.default_planner._validate_global_plan", lambda *unused: good
    )
    if good:
        ldt.merge_checkpoint(checkpoint, tmp_path / "merged")
        return
    with pytest.raises(
        ldt.LdtError, match=r"do not have each element of .* once: they overlap, or leave elements out"
    ):
        ldt.merge_checkpoint(checkpoint, tmp_path / "merged")
