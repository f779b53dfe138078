"""Further keyword arguments of a forward pass: those that describe packed documents, and those of transformers."""

from collections.abc import Mapping
from typing import Any

from deltazoo.layers.batch_description import PACKING_ARGUMENTS
from deltazoo.names import did_you_mean

__all__ = ["packing_arguments", "refuse_unknown", "softmax_arguments", "unwrapped"]

# transformers' trainer, generation and pipelines pass them to models; softmax kernels and loss functions use them.
_PASSED_THROUGH = ("max_length_q", "max_length_k", "num_items_in_batch", "output_attentions", "output_hidden_states")
# Callers may pass them to any model. Tokenizers return token types unasked, and a decoder has no embeddings for them.
# `generate` hands on the tokenizer by which it finds stop strings.
_WITHOUT_EFFECT = ("is_causal", "labels", "logits_to_keep", "token_type_ids", "tokenizer", "assistant_tokenizer")


def unwrapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments one by one; transformers' pipeline stages pass them in a dictionary called `kwargs`."""
    wrapped = kwargs.pop("kwargs", {})
    return {**kwargs, **{key: value for key, value in wrapped.items() if key != "return_dict"}}


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that no model knows."""
    known = (*PACKING_ARGUMENTS, *_PASSED_THROUGH, *_WITHOUT_EFFECT)
    for key in kwargs:
        if key not in known:
            raise TypeError(f"forward() got an unexpected argument {key!r}{did_you_mean(key, known)}")


def packing_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `describe_batch` takes."""
    return {key: kwargs[key] for key in PACKING_ARGUMENTS if kwargs.get(key) is not None}


def softmax_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that implementations of softmax attention take."""
    return {key: kwargs[key] for key in (*PACKING_ARGUMENTS, *_PASSED_THROUGH) if key in kwargs}
