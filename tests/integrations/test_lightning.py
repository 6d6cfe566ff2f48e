"""A PipelineModule over three ranks against a LightningModule of the whole model: losses, weights, checkpoints."""

from __future__ import annotations

import itertools
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ldt
from ldt.testing import RankPool, toy_chunks, toy_loss, toy_microbatches
from ldt.topology import Topology

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

WORLD_SIZE = 3
TOPOLOGY = Topology([1, 1, 1])
STEPS, MICROBATCHES = 6, 3
BATCHES = [toy_microbatches(MICROBATCHES, seed=seed) for seed in range(STEPS)]


def optimizer_of(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}


def whole(max_norm: float | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of steps and of a validation, and the weights after it."""
    import lightning_modules as edge

    chunks = toy_chunks(TOPOLOGY)
    module = edge.Whole(chunks, *optimizer_of(nn.ModuleList(chunks).parameters()))
    options: dict[str, Any] = {"gradient_clip_val": max_norm, "accumulate_grad_batches": MICROBATCHES}
    trainer = edge.Trainer(**edge.QUIET, **options, enable_checkpointing=False)
    microbatches = list(itertools.chain(*BATCHES))
    trainer.fit(module, edge.loader(microbatches), edge.loader(BATCHES[0]))
    losses = torch.stack(module.losses).view(STEPS, MICROBATCHES)
    means = [float(sum(row[1:], row[0]) / MICROBATCHES) for row in losses]
    return [*means, float(trainer.callback_metrics["val_loss"])], [p.detach() for p in module.parameters()]


def connected(use: Any, folder: Path | None = None) -> Any:
    """``use(module)`` on the edge, and the parameters of this rank's chunks after it."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE="3")
    with ldt.connect(TOPOLOGY) as mesh:
        chunks = [toy_chunks(TOPOLOGY)[index] for index in TOPOLOGY.chunks_of(mesh.stage)]
        pipeline = ldt.Pipeline(chunks, mesh, loss_fn=toy_loss if mesh.is_edge else None)
        optimizer, scheduler = optimizer_of(pipeline.parameters())
        found = None
        path = None if folder is None else folder / f"stage-{mesh.stage}"
        if not mesh.is_edge:
            ldt.follow(pipeline, optimizer, learning_rate="edge", checkpoints=path)
        else:
            import lightning_modules as edge

            with edge.Split(pipeline, optimizer, scheduler, checkpoints=path) as module:
                module.losses = []
                found = use(edge, module)
        return found, [[p.detach() for p in chunk.parameters()] for chunk in chunks]


def fit(max_norm: float | None) -> Any:
    def use(edge: Any, module: Any) -> list[float]:
        trainer = edge.Trainer(**edge.QUIET, gradient_clip_val=max_norm, enable_checkpointing=False)
        one_by_one = [[microbatch] for microbatch in BATCHES[0]]
        trainer.fit(module, edge.loader(BATCHES), edge.loader(one_by_one))
        assert trainer.global_step == STEPS
        assert module.training
        val_loss = float(trainer.callback_metrics["val_loss"])
        outputs = trainer.predict(module, edge.loader(BATCHES[:1]))
        assert len(outputs[0]) == MICROBATCHES
        return [*map(float, module.losses), val_loss]

    return connected(use)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_losses_and_weights_are_those_of_the_whole_model(pool: RankPool, max_norm: float | None) -> None:
    (found, edge), *cloud = pool.run(fit, max_norm, timeout=60)
    ((losses, weights),) = pool.run(whole, max_norm, ranks=[0], timeout=60)
    assert found == (losses if max_norm is None else pytest.approx(losses, rel=1e-6))
    head, tail = edge
    mine = [*head, *cloud[0][1][0], *cloud[1][1][0], *tail]
    same = torch.equal if max_norm is None else torch.allclose
    assert all(same(one, other) for one, other in zip(mine, weights, strict=True))


def saved(folder: str, restart: bool) -> Any:
    def use(edge: Any, module: Any) -> list[float]:
        save = edge.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = edge.Trainer(**{**edge.QUIET, "max_epochs": 2}, callbacks=[save])
        start = str(Path(folder) / "step=3.ckpt") if restart else None
        trainer.fit(module, edge.loader(BATCHES[:3]), ckpt_path=start)
        return list(map(float, module.losses))

    return connected(use, Path(folder))


def test_a_resumed_fit_continues(pool: RankPool, tmp_path: Path) -> None:
    (losses, edge), *_ = pool.run(saved, str(tmp_path), False, timeout=60)
    (again, resumed), *_ = pool.run(saved, str(tmp_path), True, timeout=60)
    assert again == losses[3:]
    pairs = zip(itertools.chain(*edge), itertools.chain(*resumed), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


WRONG: dict[str, dict[str, Any]] = {
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "gradient_clip_algorithm='value' (": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    "precision='bf16-true'": {"precision": "bf16-true"},
    "needs checkpoints=": {"max_steps": 1},
}


def wrong(name: str) -> str:
    def use(edge: Any, module: Any) -> None:
        edge.Trainer(**{**edge.QUIET, **WRONG[name]}).fit(module, edge.loader(BATCHES))

    try:
        connected(use)
    except (ValueError, ldt.LdtError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_named_and_end_the_cloud(pool: RankPool, name: str) -> None:
    edge, *cloud = pool.run(wrong, name, timeout=60)
    assert re.search(re.escape(name), edge), edge
    assert all(text.startswith("RemoteStageError") for text in cloud), cloud
