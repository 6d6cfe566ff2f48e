"""Writes the trained model of a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from ldt.errors import LdtError
from ldt.integrations.hf.checkpoint import some
from ldt.integrations.hf.make_chunks import lora_config
from ldt.integrations.hf.meta_model import meta_model, model_class
from ldt.integrations.hf.settings import Adapter
from ldt.train.checkpoint import merge_checkpoint
from ldt.train.checkpoint.catalog import Paths

__all__ = ["save_pretrained"]

logger = logging.getLogger(__name__)
_IN_ADAPTER = "lora_"


def save_pretrained(
    paths: Paths,
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    adapter: Adapter | None = None,
    step: int | None = None,
) -> int:
    """Write weights, config and tokenizer to ``folder``, for ``from_pretrained``. Returns the step of the checkpoint.

    Processors of images and sounds are copied, too. Files appear in ``folder`` once all are written. Needs memory for
    the whole model, but no process group. Adapters are merged into the weights of ``model``, and are
    written by themselves to ``folder/adapter``, for ``peft.PeftModel.from_pretrained``.

    Args:
        paths: Folders of checkpoints that together have all stages; see ``ldt.merge_checkpoint``.
        model: The model that was trained, its folder or hub name.
        folder: Where to write.
        adapter: The adapters of the settings that it was trained with.
        step: The checkpoint of this step; default: the newest that is complete.

    Raises:
        CheckpointError: As ``ldt.merge_checkpoint``.
        LdtError: The checkpoint has adapters and ``adapter`` is None, or its tensors are not those of the model.
    """
    if adapter is not None and Path(model).is_file():
        raise LdtError(f"adapters are merged into the weights of the model, got its config alone, {model}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".unfinished-") as unfinished:
        done = _write(paths, model, Path(unfinished), adapter, step)
        for path in sorted(Path(unfinished).rglob("*")):
            if path.is_file():
                place = target / path.relative_to(unfinished)
                place.parent.mkdir(exist_ok=True)
                path.replace(place)
    logger.info("wrote step %d to %s", done, target)
    return done


def _write(
    paths: Paths, model: str | os.PathLike[str], target: Path, adapter: Adapter | None, step: int | None
) -> int:
    file = target / "model.safetensors"
    done = merge_checkpoint(paths, file, step=step)
    tensors = load_file(file)
    file.unlink()
    adapters = {name: tensor for name, tensor in tensors.items() if _IN_ADAPTER in name}
    if bool(adapters) != (adapter is not None):
        raise LdtError(
            f"the checkpoint has {'' if adapters else 'no '}adapters, got adapter={adapter}: give the adapter it was "
            "trained with (python -m ldt merge: --settings with the settings.json of that run)"
        )
    if adapter is None:
        _save_weights(tensors, model, target)
    else:
        _save_merged(adapters, adapter, model, target)
    _copy_tokenizer(model, target)
    return done


def _save_weights(tensors: Mapping[str, torch.Tensor], model: str | os.PathLike[str], target: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    whole = meta_model(config, _laps(config, tensors))
    found = whole.load_state_dict(tensors, strict=False, assign=True)
    whole.tie_weights()
    lacking = [name for name, tensor in whole.named_parameters() if tensor.is_meta]
    if lacking or found.unexpected_keys:
        raise LdtError(
            f"the checkpoint is not of {os.fspath(model)}: it lacks {some(lacking) or 'nothing'} and has in addition "
            f"{some(found.unexpected_keys) or 'nothing'}"
        )
    whole.save_pretrained(target)


def _save_merged(
    adapters: Mapping[str, torch.Tensor], adapter: Adapter, model: str | os.PathLike[str], target: Path
) -> None:
    from peft import get_peft_model, set_peft_model_state_dict

    config = AutoConfig.from_pretrained(model)
    base = model_class(config, _laps(config, {})).from_pretrained(model, dtype="auto")
    whole: Any = get_peft_model(base, lora_config(adapter))
    named = {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in adapters.items()}
    expected = {name.replace(".default", "") for name, _ in whole.named_parameters() if _IN_ADAPTER in name}
    if named.keys() != expected:
        raise LdtError(
            f"the checkpoint has other adapters than {adapter} gives {os.fspath(model)}: "
            f"{some(sorted(named.keys() ^ expected))} are in one of them"
        )
    set_peft_model_state_dict(whole, named)
    whole.save_pretrained(target / "adapter")
    whole.merge_and_unload().save_pretrained(target)


def _laps(config: PreTrainedConfig, tensors: Iterable[str]) -> int:
    """Gemma 3 can be trained in one lap, without its tower, and in two."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return 2
    return 2 if any("tower" in name for name in tensors) else 1


def _copy_tokenizer(model: str | os.PathLike[str], target: Path) -> None:
    """Copy what else the model's folder has, if it has it."""
    for kind in (AutoTokenizer, AutoProcessor, AutoImageProcessor, AutoFeatureExtractor, GenerationConfig):
        try:
            kind.from_pretrained(model).save_pretrained(target)
        except (OSError, ValueError, KeyError, ImportError):
            logger.info("%s has no %s to copy", model, kind.__name__)
