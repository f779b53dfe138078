"""The validation loss, summed over all tokens, so that tokens of short rows do not weigh more than others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.workbench.train.packed_rows import IGNORED, collate


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Sequence[dict[str, np.ndarray]],
    rows_at_once: int,
    collate_rows: Callable[..., dict[str, Any]] = collate,
) -> tuple[float, int]:
    """Total negative log-likelihood of packed rows in nats, and the number of predicted tokens."""
    was_training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    for first in range(0, len(rows), rows_at_once):
        batch = collate_rows(rows[first : first + rows_at_once])
        nats += packed_nats(model, batch)
        tokens += int((batch["labels"] != IGNORED).sum())
    model.train(was_training)
    return nats, tokens


def packed_nats(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Negative log-likelihood in nats of a collated batch, summed over its labels."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    labels = inputs.pop("labels")
    logits = as_trained(model)(**inputs, use_cache=False).logits
    return nats_of(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


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
