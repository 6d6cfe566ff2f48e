"""Mixtures of experts with output_router_logits=True: their auxiliary loss over all layers is that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import Inputs, gradients, labels_of, packed, padded, text_config, tokens, unsplit
from transformers import PreTrainedConfig, PreTrainedModel

import ldt
from ldt.integrations import hf
from ldt.runtime.common.auxiliary_loss import LossRecord
from ldt.testing import RankPool
from ldt.topology import Topology

WORLD_SIZE = 4
COEFFICIENT = 0.5
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"head_dim": 8},
    "olmoe": {},
    "gpt_oss": {"head_dim": 8},
    "granitemoe": {},
    "minimax": {},
}
BATCHES = {
    "whole": {"input_ids": tokens(2, 9)},
    "left padding": padded([9, 4, 1], "left"),
    "packed": packed([4, 1, 4], [2, 7]),
}


def routed(family: str, **changes: Any) -> PreTrainedConfig:
    options = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "num_hidden_layers": 4}
    return text_config(family, **{**options, **FAMILIES.get(family, {}), **changes})


def refuse_other(model: PreTrainedModel, chunks: list[hf.Chunk]) -> None:
    found = gradients(chunks)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert found[name] is None, name
        else:
            assert torch.isfinite(parameter.grad).all()
            near = 1e-6 * float(parameter.grad.abs().max())
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=near)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    config = routed(family)
    chunks = hf.split(config, [1, 1, 2, 0]).build(range(4), attn_implementation="eager")
    hf.init_weights(chunks, seed=1)
    model = unsplit(config, chunks, 1, "eager")
    for inputs in BATCHES.values():
        for module in (*chunks, model):
            module.zero_grad()
        record = LossRecord()
        record.seed = torch.ones(())
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        with record.recording():
            hop = chunks[0](**inputs)
            for chunk in chunks[1:-1]:
                hop = chunk(*hop, **others)
            logits = chunks[-1](*hop, **others)
        whole = model(**inputs, labels=labels_of(inputs), use_cache=False)
        torch.testing.assert_close(record.values["router"].float(), whole.aux_loss)
        hf.causal_lm_loss(logits, labels_of(inputs)).backward()
        whole.loss.backward()
        refuse_other(model, chunks)


def batch_of(edge: int) -> list[Inputs]:
    """Microbatches with different numbers of tokens."""
    return [
        padded([3 + edge, 9, 2], "right"),
        padded([8, 1 + edge], "left"),
        {"input_ids": tokens(2, 5 + edge)},
    ]


def step(topology: Topology, reduction: str) -> None:
    config = routed("mixtral")
    parts = hf.split(config, [1, 2, 1][: topology.num_chunks])
    whole = parts.build(range(parts.num_chunks), attn_implementation="eager")
    hf.init_weights(whole, seed=1)
    model = unsplit(config, whole, 1, "eager")
    losses, sizes = [], []
    for edge in range(topology.edge_dp):
        for inputs in batch_of(edge):
            labels = labels_of(inputs)
            result = model(**inputs, labels=labels, use_cache=False)
            losses.append(result.loss)
            sizes.append(int((labels[:, 1:] != -100).sum()) if reduction == "token" else 1)
    total = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    total.backward()  # type: ignore[union-attr]
    with ldt.connect(topology, ranks=range(topology.world_size)) as mesh:
        chunks = parts.build(topology.chunks_of(mesh.stage), attn_implementation="eager")
        hf.init_weights(chunks, seed=1)
        loss_fn: Any = hf.token_loss if reduction == "token" else hf.causal_lm_loss
        pipeline = ldt.Pipeline(
            chunks,
            mesh,
            loss_fn=loss_fn if mesh.is_edge else None,
            loss_reduction=reduction,  # type: ignore[arg-type]
        )
        batch = [(inputs, labels_of(inputs)) for inputs in batch_of(mesh.replica)] if mesh.is_edge else None
        result = pipeline.step(batch)
        if mesh.is_edge and topology.edge_dp == 1:
            assert result.loss is not None
            objective = result.loss.double() + COEFFICIENT * result.auxiliary["router"]
            torch.testing.assert_close(objective.float(), total.detach(), rtol=1e-6, atol=0.0)  # type: ignore[union-attr]
        expected = dict(model.named_parameters())
        for name, grad in gradients(chunks).items():
            wanted = expected[name].grad
            assert (grad is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("reduction", ["mean", "token"])
@pytest.mark.parametrize(
    "topology",
    [Topology([1, 1]), Topology([1, 1], dp=2), Topology([1, 1], dp=2, edge_dp=1)],
    ids=Topology.to_text,
)
def test_a_step_minimizes_what_transformers_does(pool: RankPool, topology: Topology, reduction: str) -> None:
    """Also with two replicas, padding and different numbers of tokens."""
    pool.run(step, topology, reduction, ranks=range(topology.world_size), timeout=120)


def test_a_loss_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="the loss of its routers is not the one of Mixtral"):
        hf.split(text_config("jetmoe", output_router_logits=True, num_hidden_layers=4), [1, 2, 1])
