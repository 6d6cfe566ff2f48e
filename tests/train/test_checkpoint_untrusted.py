"""Files on a cloud's disk are untrusted: files that would run code are refused, damaged ones are named."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import Job, as_of_an_earlier_version
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import ldt
from ldt.topology import Topology


class Evil:
    """Creates a folder when unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def job() -> Iterator[Job]:
    with Job(Topology([1])) as made:
        yield made


def tampered(job: Job, path: Path, change: Callable[[Metadata], Any]) -> Path:
    """Save step 1 and apply ``change`` to its metadata. Returns the rank's folder."""
    job.train([0])
    job.save(path, 1)
    file = path / "step-1" / "stage-0" / "rank-0.0" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))
    as_of_an_earlier_version(path)  # whose checksums would detect it
    return file.parent


def refusal(job: Job, path: Path) -> str:
    """Return the error of load and merge; neither changes anything."""
    before = job.state()
    with pytest.raises(ldt.LdtError) as caught:
        job.load(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.state().items())
    with pytest.raises(ldt.LdtError) as other:
        ldt.merge_checkpoint(path, path / "merged")
    assert str(other.value) == str(caught.value)
    assert not (path / "merged").exists()
    return str(caught.value)


def test_metadata_that_run_code(job: Job, tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.planner_data = Evil(tmp_path / "evil")

    folder = tampered(job, tmp_path, change)
    assert (
        f"{folder / '.metadata'} is refused: it refers to posix.mkdir, which is not allowed in the metadata of "
        "tensors. Do not load a checkpoint from an untrusted source"
    ) in refusal(job, tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "target", ["pathlib.PosixPath", "torch.distributed.checkpoint.metadata.Metadata", "torch.float32"]
)
def test_metadata_that_change_a_class(job: Job, tmp_path: Path, target: str) -> None:
    """An instruction that sets an object's state would change all objects if applied to their class."""
    folder = tampered(job, tmp_path, lambda metadata: None)
    module, _, name = target.rpartition(".")
    change = f"c{module}\n{name}\n(N(dVmark_of_another\nVyes\nstb0".encode()
    file = folder / ".metadata"
    header, rest = file.read_bytes()[:2], file.read_bytes()[2:]
    file.write_bytes(header + change + rest)
    assert "it would change" in refusal(job, tmp_path)
    assert not hasattr(Path, "mark_of_another")
    assert not hasattr(Metadata, "mark_of_another")


@pytest.mark.parametrize("name", ["torch.load", "torch.distributed.checkpoint.metadata.os", "builtins.eval"])
def test_other_names_of_the_modules_that_are_needed(job: Job, tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    folder = tampered(job, tmp_path, lambda metadata: None)
    (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    assert f"it refers to {name}, which is not allowed" in refusal(job, tmp_path)


def test_a_tensor_that_is_a_pickle(job: Job, tmp_path: Path) -> None:
    """torch would unpickle such an entry, whatever it contains."""

    def change(metadata: Metadata) -> None:
        key = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()

    folder = tampered(job, tmp_path, change)
    with next(folder.glob("*.distcp")).open("r+b") as stream:
        torch.save(Evil(tmp_path / "evil"), stream)
    assert "is not a tensor" in refusal(job, tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", ".."])
def test_files_outside(job: Job, tmp_path: Path, name: str) -> None:
    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    tampered(job, tmp_path, change)
    assert f"it names the file {name!r}, expected one in its own folder" in refusal(job, tmp_path)


def nested() -> Any:
    """Return a value that is small in a file and huge when traversed: each tuple contains the previous one twice."""
    value: Any = (1, 1)
    for _ in range(60):
        value = (value, value)
    return value


def no_key(metadata: Metadata) -> bytes:
    """Python cannot build a dict with such a key, so it is pickled by hand."""
    nest = pickle.dumps(nested(), protocol=2)[2:-1]
    return b"\x80\x02}" + nest + b"K\x01s."


def no_name(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = nested()


def pieces(metadata: Metadata) -> None:
    next(iter(metadata.state_dict_metadata.values())).chunks *= 3000  # type: ignore[union-attr]


def enormous(metadata: Metadata) -> None:
    """Declare more elements than fit in memory for an optimizer state, which is allocated as large as the file says."""
    key = next(key for key in metadata.state_dict_metadata if key.endswith("exp_avg"))
    entry: Any = metadata.state_dict_metadata[key]
    entry.size, entry.chunks = torch.Size([10**14]), entry.chunks[:1]
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size([0]), entry.size
    index = next(index for index in metadata.storage_data if index.fqn == key)
    place = metadata.storage_data.pop(index)
    place.length = 10**16
    metadata.storage_data[type(index)(key, torch.Size([0]))] = place


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (no_key, "expected a name as a key, got a tuple"),
        (no_name, "expected the name of a file, got a tuple"),
        (pieces, "has 3000 pieces, expected at most one per rank"),
        (enormous, "it is cut short"),
    ],
)
def test_metadata_that_would_take_for_ever(
    job: Job, tmp_path: Path, change: Callable[[Metadata], Any], sentence: str
) -> None:
    folder = tampered(job, tmp_path, lambda metadata: None)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(change(metadata) or pickle.dumps(metadata))
    assert sentence in refusal(job, tmp_path)


def test_a_file_that_is_cut_short(job: Job, tmp_path: Path) -> None:
    folder = tampered(job, tmp_path, lambda metadata: None)
    file = next(folder.glob("*.distcp"))
    size = file.stat().st_size
    os.truncate(file, size - 1)
    expected = f"{file} is damaged: it is cut short: expected {size} bytes, got {size - 1}"
    assert expected in refusal(job, tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"no": "metadata"})])
def test_metadata_that_are_damaged(job: Job, tmp_path: Path, content: bytes) -> None:
    folder = tampered(job, tmp_path, lambda metadata: None)
    (folder / ".metadata").write_bytes(content)
    assert f"{folder / '.metadata'} is damaged" in refusal(job, tmp_path)


def test_a_tensor_that_is_damaged(job: Job, tmp_path: Path) -> None:
    """It is detected while reading: the error describes the state that this leaves."""
    folder = tampered(job, tmp_path, lambda metadata: None)
    with next(folder.glob("*.distcp")).open("r+b") as stream:
        stream.write(bytes(64))
    with pytest.raises(
        ldt.LdtError, match=r"stage-0 is damaged: a tensor .* Some weights of rank 0 may already be changed"
    ):
        job.load(tmp_path)


OF_NO_STAGE = {
    "format": 2,
    "topology": "tp=1 dp=1 edge_dp=1 laps=1",
    "stage": 1,
    "step": 2,
    "save_id": "a",
    "aliases": {},
    "optimizer": None,
    "extra": {},
    "position": None,
}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": 2}', '{"format": 99, "ldt": "7"}', json.dumps(OF_NO_STAGE)],
)
def test_a_damaged_record(job: Job, tmp_path: Path, content: str) -> None:
    job.save(tmp_path, 1)
    job.save(tmp_path, 2)
    (tmp_path / "step-2" / "stage-0" / "stage.json").write_text(content)
    with pytest.raises(
        ldt.LdtError, match=r"step-2 exists but cannot be used, and the complete steps are \[1\]"
    ):
        job.load(tmp_path)
    assert job.load(tmp_path, step=1) == ldt.LoadedCheckpoint(1)


@pytest.mark.parametrize(
    "change", [{"python": [3, [1], None]}, {"torch": "AAAA"}, {"torch": "no base64"}, {"python": 1}]
)
def test_random_states_that_are_damaged(job: Job, tmp_path: Path, change: dict[str, Any]) -> None:
    job.save(tmp_path, 1)
    as_of_an_earlier_version(tmp_path)
    file = tmp_path / "step-1" / "stage-0" / "rank-0.0" / "random_states.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ldt.LdtError, match=r"random_states\.json is damaged: its random states are invalid"):
        job.load(tmp_path)
