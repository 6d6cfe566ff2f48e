"""Hugging Face models as chunks: ``pip install 'ldt-torch[hf]'``.

    from ldt.integrations import hf

    parts = hf.split("path/to/model", layers=[2, 13, 13, 2])        # P = 3 stages, one lap: C = 4 chunks
    chunks = parts.build(topology.chunks_of(mesh.stage), device=mesh.device)
    hf.load_weights(chunks, "path/to/model")                        # or hf.init_weights(chunks, seed=0)
    pipeline = ldt.Pipeline(chunks, mesh, plan, loss_fn=hf.token_loss, loss_reduction="token")

A chunk is an instance of the model's own class in which the parts of other chunks are replaced by modules without
weights that return their input. So masks, rotary embeddings, layer types and weight names are those of transformers,
and a model family needs no code of its own.
"""

from typing import TYPE_CHECKING, Any

from ldt.integrations.hf.adapters import add_adapter
from ldt.integrations.hf.build import Built, build, follow
from ldt.integrations.hf.chunks import Chunk
from ldt.integrations.hf.export import save_pretrained
from ldt.integrations.hf.inputs import packed_position_ids, position_ids
from ldt.integrations.hf.loss import causal_lm_loss, seq2seq_token_loss, token_loss
from ldt.integrations.hf.make_chunks import make_optimizer
from ldt.integrations.hf.optimizer import parameter_groups
from ldt.integrations.hf.settings import Adapter, Optimizer, Settings
from ldt.integrations.hf.split import Split, split
from ldt.integrations.hf.weights import init_weights, load_weights, state_dict

if TYPE_CHECKING:
    from ldt.integrations.hf.trainer import Trainer, TrainerMixin, create_optimizer

__all__ = [
    "Adapter",
    "Built",
    "Chunk",
    "Optimizer",
    "Settings",
    "Split",
    "Trainer",
    "TrainerMixin",
    "add_adapter",
    "build",
    "causal_lm_loss",
    "create_optimizer",
    "follow",
    "init_weights",
    "load_weights",
    "make_optimizer",
    "packed_position_ids",
    "parameter_groups",
    "position_ids",
    "save_pretrained",
    "seq2seq_token_loss",
    "split",
    "state_dict",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    """Import what needs accelerate when it is used."""
    if name not in ("Trainer", "TrainerMixin", "create_optimizer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ldt.integrations.hf import trainer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "accelerate":
            raise
        raise ImportError(f"hf.{name} needs accelerate: pip install 'ldt-torch[trainer]'") from error
    return getattr(trainer, name)
