"""The text example trains on the test device as on NPUs, and equals one process there."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import npu
import pytest
import torch.distributed as dist

import ldt
from ldt.testing import RankPool
from ldt.topology import Topology

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

WORLD_SIZE = 3
EXAMPLES = str(Path(__file__).parents[2] / "examples")
TINY = "--steps 2 --microbatches 3 --batch 1 --sequence 16 --width 32 --continuation 1 --device npu --check"


def example() -> Any:
    sys.path.insert(0, EXAMPLES)
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    import train_text

    return train_text


def trained(arguments: str) -> tuple[str, float | None]:
    """Train in this rank's process. Returns what it prints and, on the edge, the loss afterwards."""
    with npu.late(1, 300), contextlib.redirect_stdout(io.StringIO()) as printed:
        text = example()
        options = text.parse_options(arguments.split())
        device = text.select_device(options.device)
        assert device.device.index == dist.get_rank()
        topology = Topology(options.stages)
        model = text.ByteModel.of(options, topology)
        with ldt.connect(topology, device.backend, device=device.device) as mesh:
            corpus = text.Corpus.load(options, device) if mesh.is_edge else None
            pipeline = text.build_pipeline(options, mesh, model)
            text.train(options, pipeline, corpus, text.Checker(options, pipeline, model, corpus))
            assert {parameter.device for parameter in pipeline.parameters()} == {mesh.device}
            text.continue_text(pipeline, options)
            result = pipeline.eval(corpus.held_out(1) if corpus else None)
            return printed.getvalue(), None if result.loss is None else float(result.loss)


def test_training_equals_one_process(pool: RankPool) -> None:
    printed, loss = pool.run(trained, TINY, timeout=120)[0]
    assert "runs on NPUs, one for each rank: this host has 4\n" in printed
    assert "check of step 1: losses and gradients are bit-equal" in printed
    assert loss is not None
    assert 4 < loss < 5.5, "it learned"


def refused() -> str:
    npu.start()
    text = example()
    os.environ["LOCAL_WORLD_SIZE"] = "5"
    with pytest.raises(ValueError, match="--device npu: HCCL needs an NPU for each rank, got 4 for 5 ranks"):
        text.select_device("npu")
    return str(text.select_device("auto").device)


def test_fewer_npus_than_ranks_are_not_shared(pool: RankPool) -> None:
    assert pool.run(refused, ranks=[0], timeout=60) == ["cpu"]
