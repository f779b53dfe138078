"""How padding and packing reach swapped layers: the base model describes each batch before it runs.

The mask that reaches an attention layer is about pairs of tokens, perhaps within a sliding window, and no longer says
which tokens are padding. So a hook on the base model makes the description (`layers/batch_description.py`) from what
the caller passed. The description is one more keyword argument, which every model passes on to its attention. An
argument survives recomputation under gradient checkpointing and leaves compiled code nothing to guard.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deltazoo.generation.cache import check_cache
from deltazoo.generation.cache_argument import cache_in
from deltazoo.models.forward_arguments import describe_arguments, refuse_several_documents, take_row_head
from deltazoo.ops import ContextParallel

__all__ = ["describe_batches", "token_mask_for"]

_TOKEN_MASK = "delta_token_mask"


def describe_batches(base_model: nn.Module) -> RemovableHandle:
    """Have `base_model` describe every batch to its swapped layers, until the handle is removed."""
    names = tuple(inspect.signature(base_model.forward).parameters)
    return base_model.register_forward_pre_hook(partial(_describe, names), with_kwargs=True)


def _describe(
    names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """The hook: `names` are those of the forward pass's positional arguments."""
    return (), _with_description(module, dict(zip(names, args, strict=False)) | kwargs)


def _with_description(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    context: ContextParallel | None = model.deltazoo_context
    row_head = take_row_head(kwargs)
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None or kwargs.get("delta_batch") is not None:
        return kwargs  # the model raises; the batch is described already
    cache, position_ids = cache_in(kwargs), kwargs.get("position_ids")
    past_length: int | Tensor = 0
    if cache is not None:
        check_cache(cache, model.config.num_hidden_layers)
        past_length = cache.get_seq_length()
    mask = _token_mask(kwargs)
    batch = describe_arguments(context, tokens, cache, past_length, mask, position_ids, kwargs)
    kwargs["delta_batch"] = batch
    if batch.beyond_one_row:
        refuse_several_documents(row_head)
    if context is not None:
        kwargs |= {"attention_mask": None, "position_ids": batch.position_ids, "use_cache": False}
    elif position_ids is None and isinstance(mask, Tensor):
        # Else padding on the left would rotate keys further, and a decay per channel does not follow a rotation.
        kwargs["position_ids"] = batch.position_ids
    kwargs.pop("cu_seqlens", None)  # the one name of ours that transformers does not know
    if batch.packed:
        # The softmax layers that remain tell documents apart by position_ids, and only without a mask.
        masked = kwargs.pop("attention_mask", None) is not None
        kwargs["position_ids"] = batch.sequences.positions if masked or position_ids is None else position_ids
        kwargs["use_cache"] = False
    return kwargs


def _token_mask(kwargs: dict[str, Any]) -> Tensor | Mapping[str, Tensor | None] | None:
    """Which tokens are real: the caller's mask, or that of `token_mask_for` where `generate` has prepared masks."""
    mask = kwargs.get("attention_mask")
    if _TOKEN_MASK in kwargs:
        return {"linear_attention": kwargs.pop(_TOKEN_MASK)}
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return mask
    raise ValueError(
        f"a swapped model takes attention_mask [batch, tokens] with 1 = real token, got {_in_words(mask)}: a linear "
        "layer cannot follow a mask over pairs of tokens"
    )


def _in_words(mask: Any) -> str:
    return f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"


def token_mask_for(attention_mask: Tensor | None, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The padding among the tokens of a generation step whose masks are prepared already, as an argument.

    Args:
        attention_mask: `[B, past + T]` as the user gave it.
        inputs: what `prepare_inputs_for_generation` made of it.

    Returns:
        An argument for the base model; it is None for single tokens, which are never padding, so that compiled decoding
        sees the same arguments at every step.
    """
    prepared = inputs.get("attention_mask")
    if prepared is None or prepared is attention_mask or (isinstance(prepared, Tensor) and prepared.ndim == 2):
        return {}
    tokens = inputs.get("input_ids")
    num_tokens = (inputs["inputs_embeds"] if tokens is None else tokens).shape[1]
    if attention_mask is None or num_tokens == 1:
        return {_TOKEN_MASK: None}
    mask = attention_mask[:, -num_tokens:].bool()
    return {_TOKEN_MASK: None if not torch.compiler.is_compiling() and bool(mask.all()) else mask}
