"""The validation loss, summed over all tokens, so that tokens of short rows do not weigh more than others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.models.delta_layers import evaluation_mode
from deltazoo.training.tokens import IGNORED, collate


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Sequence[dict[str, np.ndarray]],
    rows_at_once: int,
    collate_rows: Callable[..., dict[str, Any]] = collate,
    empty_passes: Sequence[dict[str, np.ndarray]] = (),
) -> tuple[float, int]:
    """Total negative log-likelihood of packed rows in nats, and the number of predicted tokens.

    Args:
        model: in training or not.
        rows: to score.
        rows_at_once: rows of a forward pass.
        collate_rows: makes a batch of rows.
        empty_passes: as many forward passes as these rows in all, the further ones on these rows and not counted.
    """
    nats, tokens = 0.0, 0
    passes = [rows[first : first + rows_at_once] for first in range(0, len(rows), rows_at_once)]
    with evaluation_mode(model):
        for scored in passes:
            batch = collate_rows(scored)
            nats += packed_nats(model, batch)
            tokens += int((_targets(batch) != IGNORED).sum())
        for row in empty_passes[len(passes) :]:
            packed_nats(model, collate_rows([row]))
    return nats, tokens


def packed_nats(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Negative log-likelihood in nats of a collated batch, or of a rank's piece of one, summed over its labels."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if "labels" not in name}
    logits = as_trained(model)(**inputs, use_cache=False).logits
    return nats_of(logits.flatten(0, 1), _targets(batch).flatten().to(model.device))


def _targets(batch: dict[str, Any]) -> torch.Tensor:
    """What each token predicts `[B, T]`: of a piece its own `shift_labels`, whose last one another rank holds."""
    return batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def nats_of(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Negative log-likelihood of ``targets`` [T] under ``logits`` [T, vocabulary], in fp32, summed in fp64."""
    losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    return float(losses.double().sum())


def as_trained(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's forward pass as in training: with bf16 autocast on a GPU that supports it."""

    def forward(**inputs: Any) -> Any:
        on_gpu = model.device.type == "cuda" and torch.cuda.is_bf16_supported()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=on_gpu):
            return model(**inputs)

    return forward
