"""Jobs of the checkpoint tests: a model of blocks that any topology can split, and its training."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ldt
from ldt.runtime import TensorSpec
from ldt.testing import toy_loss, toy_microbatches
from ldt.topology import Topology

BLOCKS, WIDTH = 8, 16
State = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Has a persistent buffer, and one parameter that never gets a gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Part(nn.Module):
    """A sequence of blocks, which provides their names in the whole model."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x

    def whole_model_name(self, name: str) -> str:
        return name

    def output_spec(self, inputs: TensorSpec) -> TensorSpec:
        return TensorSpec(inputs.shape, inputs.dtype, requires_grad=True)


def parts(topology: Topology, seed: int = 0, dropout: float = 0.0) -> list[Part]:
    """Return all chunks; every topology builds the same model."""
    torch.manual_seed(seed)
    blocks = {str(index): Block(dropout) for index in range(BLOCKS)}
    ends = [BLOCKS * index // topology.num_chunks for index in range(topology.num_chunks + 1)]
    items = list(blocks.items())
    return [Part(dict(items[start:end])) for start, end in itertools.pairwise(ends)]


def spread(part: Part, mesh: ldt.Mesh, way: str) -> nn.Module:
    """Parallelize as ``way`` says: over the ranks of a node if there are several, then over replicas."""
    topology = mesh.topology
    if topology.tp[mesh.stage] > 1:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(part, mesh.tp_mesh, plan)
    if topology.replicas(mesh.stage) > 1 and way == "fully_shard":
        fully_shard(part, mesh=mesh.dp_mesh)
    if topology.replicas(mesh.stage) > 1 and way == "ddp":
        return DistributedDataParallel(
            part, process_group=mesh.dp_mesh.get_group(), find_unused_parameters=True
        )
    return part


class Job:
    """A pipeline with AdamW and a learning rate schedule, on the first ranks of the world."""

    def __init__(
        self,
        topology: Topology,
        way: str = "plain",
        *,
        seed: int = 0,
        dropout: float = 0.0,
        frozen: Sequence[int] = (),
        **options: Any,
    ) -> None:
        ranks = range(topology.world_size) if dist.is_initialized() else None
        self.mesh = ldt.connect(topology, ranks=ranks, **options)
        chunks = [part.to(self.mesh.device) for part in parts(topology, seed, dropout)]
        mine = [spread(chunks[index], self.mesh, way) for index in topology.chunks_of(self.mesh.stage)]
        if self.mesh.stage in frozen:
            nn.ModuleList(mine).requires_grad_(False)
        self.pipeline = ldt.Pipeline(mine, self.mesh, loss_fn=toy_loss)
        trained = [parameter for parameter in self.pipeline.parameters() if parameter.requires_grad]
        # On GPUs the default is foreach, which does not support groups in which only some parameters are sharded.
        self.optimizer = torch.optim.AdamW(_groups(trained), lr=0.01, foreach=False) if trained else None
        self.extra: dict[str, Any] = {}
        if self.optimizer is not None:
            self.extra["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        seed_all(100 * seed + topology.nodes.index(self.mesh.node))  # equal dropout on the ranks of a node

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self.mesh.__exit__(*error)

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            batch = on_device(toy_microbatches(4, WIDTH, seed=step), self.mesh.device)
            self.pipeline.step(batch if self.mesh.is_edge else None)
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            for scheduler in self.extra.values():
                scheduler.step()

    def save(self, path: Any, step: int, **options: Any) -> None:
        ldt.save_checkpoint(path, self.pipeline, self.optimizer, step=step, extra=self.extra, **options)

    def load(self, path: Any, **options: Any) -> ldt.LoadedCheckpoint | None:
        return ldt.load_checkpoint(path, self.pipeline, self.optimizer, extra=self.extra, **options)

    def state(self) -> State:
        """Return weights, buffers, optimizer state and learning rates by name, unsharded, on the CPU."""
        found: State = {}
        for chunk in self.pipeline.chunks:
            for name, tensor in chunk.state_dict(keep_vars=True).items():
                found[name] = _whole(tensor)
                found |= self._of_optimizer(name, tensor)
        return found

    def _of_optimizer(self, name: str, parameter: torch.Tensor) -> State:
        if self.optimizer is None:
            return {}
        values = self.optimizer.state.get(parameter, {})
        found = {f"{name} {key}": _whole(value) for key, value in values.items()}
        for group in self.optimizer.param_groups:
            if any(parameter is other for other in group["params"]):
                assert isinstance(group["betas"], tuple)
                found[f"{name} lr"] = torch.tensor([group["lr"], group["initial_lr"], group["weight_decay"]])
        return found


def _groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def on_device(batch: Sequence[Pair], device: torch.device) -> list[Pair]:
    return [(inputs.to(device), target.to(device)) for inputs, target in batch]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def as_of_an_earlier_version(path: Path) -> None:
    """Remove the checksums of the saves in ``path``, as in an earlier version of the format."""
    for file in path.rglob("stage.json"):
        content = json.loads(file.read_text()) | {"format": 2}
        del content["crc32"]
        file.write_text(json.dumps(content, indent=1))
    for file in path.rglob("checksums.json"):
        file.unlink()


def drawn() -> list[float]:
    """Draw a random number from each generator."""
    return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]


def assert_equal_states(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, different[:5]


def merged(states: Sequence[State]) -> State:
    """Merge the states of all ranks; values that several ranks have must be equal."""
    whole: State = {}
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole
