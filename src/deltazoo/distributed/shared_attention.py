"""Softmax attention of a piece of a sequence that several ranks share: keys and values of all, gathered."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltazoo.layers.sequences import SharedSequences
from deltazoo.ops.context.token_exchange import all_tokens

__all__ = ["SHARED_ATTENTION", "register_shared_attention"]

SHARED_ATTENTION = "deltazoo_shared"
"""The name of this implementation of attention in a configuration of transformers."""

_QUERIES = 1024
"""Queries at a time, so that masks stay small and no key after the last of them is read."""


def register_shared_attention() -> None:
    """Make the implementation known to transformers, which then makes no mask for it."""
    ALL_ATTENTION_FUNCTIONS.register(SHARED_ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED_ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask follows from the description of the batch."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    delta_batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries to the keys of all ranks, as transformers calls its implementations.

    Args:
        module: the layer.
        query: `[B, H, T, d]`, of this rank's piece; key and value: `[B, G, T, d]`.
        attention_mask: None.
        scaling: of the scores, `d ** -0.5` unless given.
        dropout: of the weights.
        delta_batch: the description of the batch.
        kwargs: others', without effect.

    Returns:
        `[B, T, H, d]`, and None in place of the weights.

    Raises:
        NotImplementedError: attention within a window, or with a mask or logits of its own kind.
    """
    sequences = None if delta_batch is None else delta_batch.sequences
    if not isinstance(sequences, SharedSequences):
        raise ValueError("the model around this layer was called without a description of the rows that ranks share")
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if odd or attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(
            "softmax layers of rows that several ranks share are causal and without a mask, got "
            f"{', '.join(odd) or 'a mask'}"
        )
    seen = sequences.begin + sequences.num_tokens  # no query sees the tokens of later ranks
    key, value = (all_tokens(x.transpose(1, 2), sequences.context)[:, :seen].transpose(1, 2) for x in (key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    outputs = []
    for first in range(0, sequences.num_tokens, _QUERIES):
        queries = query[:, :, first : first + _QUERIES]
        begin = sequences.begin + first
        end = begin + queries.shape[2]
        mask = _visible(sequences, begin, end, query.device)
        keys, values = key[:, :, :end], value[:, :, :end]
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scaling))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _visible(sequences: SharedSequences, begin: int, end: int, device: torch.device) -> Tensor:
    """`[end - begin, end]` bool: which tokens those from `begin` attend to: of their sequence, up to themselves."""
    tokens = torch.arange(end, device=device)
    queries = tokens[begin:, None]
    visible = queries >= tokens
    if sequences.cu_seqlens is None:
        return visible
    starts = sequences.cu_seqlens[torch.searchsorted(sequences.cu_seqlens, queries, right=True) - 1]
    return visible & (tokens >= starts)
