"""The arguments of a forward pass: what they say of the batch, and which further ones there are."""

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltazoo.generation.cache import why_not_shared
from deltazoo.generation.cache_argument import CACHE
from deltazoo.layers.batch_description import (
    PACKING_ARGUMENTS,
    BatchDescription,
    describe_batch,
    describe_shared_batch,
)
from deltazoo.names import did_you_mean
from deltazoo.ops import ContextParallel

__all__ = ["describe_arguments", "refuse_dropped", "refuse_unknown", "softmax_arguments", "unwrapped"]

# transformers' trainer, generation and pipelines pass them to models; softmax kernels and loss functions use them.
_PASSED_THROUGH = ("max_length_q", "max_length_k", "num_items_in_batch", "output_attentions", "output_hidden_states")
# Callers may pass them to any model. Tokenizers return token types unasked, and a decoder has no embeddings for them.
# `generate` hands on the tokenizer by which it finds stop strings.
_WITHOUT_EFFECT = ("is_causal", "labels", "logits_to_keep", "token_type_ids", "tokenizer", "assistant_tokenizer")

_KNOWN = (*PACKING_ARGUMENTS, *_PASSED_THROUGH, *_WITHOUT_EFFECT)


def unwrapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments one by one; transformers' pipeline stages pass them in a dictionary called `kwargs`."""
    wrapped = kwargs.pop("kwargs", {})
    return {**kwargs, **{key: value for key, value in wrapped.items() if key != "return_dict"}}


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that no model knows, ValueError for one that a recurrence cannot obey."""
    _refuse_later_tokens(kwargs)
    for key in kwargs:
        if key not in _KNOWN:
            raise TypeError(f"forward() got an unexpected argument {key!r}{did_you_mean(key, _KNOWN)}")


def refuse_dropped(layer: nn.Module, kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise as `refuse_unknown` for an argument that a decoder layer passes down and that would have no effect.

    A cache, a mask or the boundaries of documents under a name of another version of transformers are such. None says
    nothing, whatever its name.

    Args:
        layer: that was called, in the slot of an attention layer of transformers.
        kwargs: what its `forward` does not name.
        known: those that the layer reads itself, or may leave out.
    """
    _refuse_later_tokens(kwargs)
    for key, value in kwargs.items():
        if value is not None and key not in known and key not in _KNOWN:
            raise TypeError(
                f"{type(layer).__name__}.forward() got {key!r}, which it does not know under transformers "
                f"{transformers.__version__}{did_you_mean(key, (CACHE, *known, *_KNOWN))}"
            )


def _refuse_later_tokens(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False asks for attention to later tokens, which delta-rule layers never see")


def describe_arguments(
    context: ContextParallel | None,
    tokens: Tensor,
    cache: Cache | None,
    past_length: int | Tensor,
    attention_mask: Tensor | Mapping[str, Tensor | None] | None,
    position_ids: Tensor | None,
    kwargs: Mapping[str, Any],
) -> BatchDescription:
    """Where the sequences of a batch begin, and which tokens are padding.

    Args:
        context: the ranks that share every row; None: rows are whole.
        tokens: `[B, T]` numbers or `[B, T, hidden_size]` embeddings.
        cache: that the tokens continue and fill.
        past_length: tokens in it.
        attention_mask, position_ids: as of `describe_batch`.
        kwargs: further arguments, those that tell of packed documents among them.
    """
    batch_size, num_tokens = tokens.shape[:2]
    given: dict[str, Any] = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "fills_cache": cache is not None,
        **{key: kwargs[key] for key in PACKING_ARGUMENTS if kwargs.get(key) is not None},
    }
    if context is None:
        return describe_batch(batch_size, num_tokens, past_length, tokens.device, **given)
    wrong_cache = why_not_shared(cache)
    return describe_shared_batch(context, batch_size, num_tokens, tokens.device, wrong_cache=wrong_cache, **given)


def softmax_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that implementations of softmax attention take."""
    return {key: kwargs[key] for key in (*PACKING_ARGUMENTS, *_PASSED_THROUGH) if key in kwargs}
