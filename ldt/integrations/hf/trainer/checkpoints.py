"""Saves and loads through ldt.Leader: each stage keeps its own weights and optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ldt.errors import LdtError
from ldt.train import Leader
from ldt.train.checkpoint.json_values import from_json, to_json
from ldt.train.checkpoint.layout import saves_in

__all__ = ["CheckpointsMixin"]

_STAGES = "stages"  # folder in output_dir: stage 0 of every checkpoint
_SCHEDULER, _ARGUMENTS = "scheduler.json", "training_args.json"  # transformers pickles both
_ALL = 10**6
_Trainer: Any = object  # a Trainer of transformers comes behind these classes


class CheckpointsMixin(_Trainer):  # type: ignore[misc]
    """Checkpoints of the Trainer.

    ``checkpoint-<step>`` in ``output_dir`` has the state of the Trainer, its scheduler, the tokenizer and the model's
    config. Weights and optimizers are in ``output_dir/stages/step-<step>`` on the edge, and in the folder
    ``checkpoints`` of ``ldt.follow`` on the cloud.
    """

    leader: Leader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save all stages as the current step, and the config and tokenizer in ``output_dir``.

        ``python -m ldt merge`` makes one file of the stages.
        """
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.leader.save(self._stages, step=self.state.global_step, keep=self._keep())
        self.model.config.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / _ARGUMENTS).write_text(self.args.to_json_string())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = to_json(self.lr_scheduler.state_dict(), "the state of the scheduler")
        (Path(output_dir) / _SCHEDULER).write_text(json.dumps(state))

    def _save_scaler(self, output_dir: str) -> None:
        """The pipeline's grad scaler is saved with the stages."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Done by ``_load_optimizer_and_scheduler``, when there is a scheduler."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load_stages(checkpoint)
            file = Path(checkpoint) / _SCHEDULER
            if file.exists():  # it does not with save_only_model
                self.lr_scheduler.load_state_dict(from_json(json.loads(file.read_text())))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """The pipeline's grad scaler is loaded with the stages."""

    def _load_best_model(self) -> None:
        self._load_stages(self.state.best_model_checkpoint)

    def _load_stages(self, checkpoint: str) -> None:
        folder = Path(checkpoint)
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if not step.isdigit():
            raise LdtError(f"expected the folder of a checkpoint, checkpoint-<step>, got {folder.name}")
        self.leader.load(folder.parent / _STAGES, step=int(step))

    @property
    def _stages(self) -> Path:
        return Path(self.args.output_dir) / _STAGES

    def _keep(self) -> int:
        """How many saves the stages keep: those that the Trainer keeps, and all from the best on."""
        limit = self.args.save_total_limit
        if not limit:
            return _ALL
        best = self.state.best_global_step
        since_best = sum(save.step >= best for save in saves_in(self._stages)) if best else 0
        return max(int(limit), since_best + 1)
