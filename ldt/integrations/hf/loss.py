"""The losses of language models, for the edge."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

__all__ = ["causal_lm_loss", "seq2seq_token_loss", "token_loss"]

IGNORED = -100  # a label without loss, as everywhere in transformers


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of losses over predicted tokens and their number, for ``Pipeline(loss_reduction="token")``.

    ``logits`` [batch, sequence, vocabulary] and ``labels`` [batch, sequence] belong to the same tokens: the logits of
    one predict the label of the next. Labels of -100 do not count.
    """
    return seq2seq_token_loss(logits[:, :-1], labels[:, 1:])


def seq2seq_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise for a decoder beside an encoder, as in T5 and Whisper: the logits of a place predict its own label.

    The decoder's inputs are the labels behind a start token: ``decoder_input_ids`` of the microbatch.
    """
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (labels != IGNORED).sum()


def causal_lm_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss that a causal language model of transformers returns, for ``Pipeline(loss_reduction="sum")``.

    With ``num_items_in_batch``, the number of predicted tokens in all microbatches of a step, it is the sum of the
    losses of ``logits`` divided by that: give it as ``loss_kwargs``, as ``hf.Trainer`` does. Without, it is their mean.
    """
    loss: torch.Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
    return loss
