"""The tied embedding of a Hugging Face model, after its two chunks were wrapped: still tied, or refused by name."""

from __future__ import annotations

import pytest
from hf_models import text_config
from torch.distributed.fsdp import fully_shard

import ldt
from ldt.integrations import hf
from ldt.testing import RankPool

WORLD_SIZE = 4


def building(sharded: bool, loaded: bool) -> str:
    """Return the error of ``Pipeline`` for replicas with edge chunks in fully_shard, before or after loading."""
    topology = ldt.Topology([1, 1], dp=2)
    parts = hf.split(text_config("llama", tie_word_embeddings=True), [1, 3, 1])
    with ldt.connect(topology) as mesh:
        chunks = parts.build(topology.chunks_of(mesh.stage))
        if loaded:
            hf.init_weights(chunks, seed=0)
        for chunk in chunks if sharded and mesh.is_edge else ():
            fully_shard(chunk, mesh=mesh.dp_mesh)
        try:
            ldt.Pipeline(chunks, mesh, loss_fn=hf.token_loss, loss_reduction="token")
        except ldt.LdtError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("loaded", [True, False])
def test_a_tie_that_fully_shard_broke(pool: RankPool, loaded: bool) -> None:
    for text in pool.run(building, True, loaded):
        assert "model.model.embed_tokens.weight of chunk 0 (float32[101, 32]" in text
        assert "model.embed_tokens.weight of chunk 2 (float32[101, 32]" in text
        assert "are one weight of the model: fully_shard, parallelize_module or a copy split it" in text


def test_a_tie_that_is_left_alone(pool: RankPool) -> None:
    assert pool.run(building, False, True) == [""] * 4
