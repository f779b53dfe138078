"""The arguments of a forward pass: those that describe the batch, and those that are passed on or have no effect."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltazoo.generation.batch import (
    PACKING_ARGUMENTS,
    BatchDescription,
    describe_batch,
    describe_shared_batch,
)
from deltazoo.generation.cache import CACHE, why_not_shared
from deltazoo.names import did_you_mean
from deltazoo.ops import ContextParallel
from deltazoo.ops.validation import check_tensor

# transformers' trainer, generation and pipelines pass these to models; softmax kernels and loss functions use them.
_PASSED_THROUGH = ("max_length_q", "max_length_k", "num_items_in_batch", "output_attentions", "output_hidden_states")
# Any model may be called with these. Tokenizers return token types unasked, and a decoder has no embeddings for them.
# `generate` passes on the tokenizer by which it finds stop strings.
_WITHOUT_EFFECT = ("is_causal", "labels", "logits_to_keep", "token_type_ids", "tokenizer", "assistant_tokenizer")
# Models of transformers pass the arguments of their loss on to every layer.
_OF_THE_LOSS = ("shift_labels", "ignore_index")

OF_SOFTMAX_KERNELS = (*PACKING_ARGUMENTS, *_PASSED_THROUGH)
"""The arguments that implementations of softmax attention take."""
_KNOWN = (*OF_SOFTMAX_KERNELS, *_WITHOUT_EFFECT)
ROW_HEAD = "deltazoo_row_head"
"""The argument that names the head around a base model if it has one answer per row; the base model takes it away."""


def unwrapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the dictionary called `kwargs` in which transformers' pipeline stages pass them."""
    wrapped = kwargs.pop("kwargs", {})
    return {**kwargs, **{key: value for key, value in wrapped.items() if key != "return_dict"}}


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that no model knows, ValueError for one that asks to attend to later tokens."""
    _refuse_later_tokens(kwargs)
    for key in kwargs:
        if key not in _KNOWN:
            raise TypeError(f"forward() got an unexpected argument {key!r}{did_you_mean(key, _KNOWN)}")


def refuse_dropped(layer: nn.Module, kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise as `refuse_unknown` for an argument that a decoder layer passes down and that would have no effect.

    Such an argument may be a cache, a mask or boundaries of documents under a name of another version of transformers.
    An argument of value None is never refused.

    Args:
        layer: the layer that was called in place of an attention layer of transformers.
        kwargs: the arguments that its `forward` does not name.
        known: names of arguments that the layer reads, or may leave out.
    """
    _refuse_later_tokens(kwargs)
    for key, value in kwargs.items():
        if value is not None and key not in (*known, *_KNOWN, *_OF_THE_LOSS):
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
    arguments: Mapping[str, Any],
) -> BatchDescription:
    """The description of a batch: where its sequences begin, and which tokens are padding.

    Args:
        context: the ranks that share every row; None: rows are whole.
        tokens: `[B, T]` numbers or `[B, T, hidden_size]` embeddings.
        cache: the cache that the tokens continue and fill.
        past_length: number of tokens in it.
        arguments: arguments of the forward pass, among them those of `describe_batch`.
    """
    names = ("attention_mask", "position_ids", *PACKING_ARGUMENTS)
    given: dict[str, Any] = {name: arguments.get(name) for name in names} | {"fills_cache": cache is not None}
    check_tensor("input_ids", tokens)
    batch_size, num_tokens = tokens.shape[:2]
    if context is None:
        return describe_batch(batch_size, num_tokens, past_length, tokens.device, **given)
    wrong_cache = why_not_shared(cache)
    return describe_shared_batch(context, batch_size, num_tokens, tokens.device, wrong_cache=wrong_cache, **given)


def tell_of_row_head(model: nn.Module) -> None:
    """Have a head with one answer per row tell its base model about it in every call; other heads do nothing.

    Such a head classifies a sequence by its last token, or has a loss of one answer per row. The base model refuses
    packed documents for it (`refuse_several_documents`).
    """
    reduces = _is_a(model, "ForSequenceClassification", "ForQuestionAnswering")
    if reduces and tells_of_row_head not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(tells_of_row_head, with_kwargs=True)


def tells_of_row_head(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of `tell_of_row_head`."""
    # Without a loss every token has logits of its own.
    if _is_a(model, "ForQuestionAnswering") and kwargs.get("start_positions") is None:
        return None
    return args, {**kwargs, ROW_HEAD: type(model).__name__}


def _is_a(model: nn.Module, *heads: str) -> bool:
    return any(kind.__name__.endswith(heads) for kind in type(model).__mro__)


def remove_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Take a forward pre-hook that is called with keyword arguments off a module, if it is there."""
    for key, found in list(module._forward_pre_hooks.items()):
        if found is hook:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def refuse_several_documents(row_head: str | None) -> None:
    """Raise ValueError for packed documents, or rows that several ranks share, under a head with one answer per row."""
    if row_head is not None:
        raise ValueError(
            f"{row_head} has one answer per row, so it takes no rows that hold several documents and none that several "
            "ranks share: pass each document as a row of its own, padded"
        )
