"""Load a model in the form that the engine runs."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.compat import accelerate
from deltazoo.layers import DeltaRuleAttention
from deltazoo.training.loading import load_checkpoint

__all__ = ["load_for_serving"]


def load_for_serving(
    path: str, device: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer; delta-rule models of transformers are accelerated.

    Args:
        path, device, dtype: see `load_checkpoint`.

    Raises:
        ValueError: as `load_checkpoint`, or a model without delta-rule layers.
    """
    model, tokenizer = load_checkpoint(path, device, dtype)
    if not any(isinstance(module, DeltaRuleAttention) for module in model.modules()):
        accelerate(model)
    return model, tokenizer
