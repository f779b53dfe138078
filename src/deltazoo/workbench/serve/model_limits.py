"""What an engine may ask of a model: how many tokens, and which of them end an answer."""

from collections.abc import Sequence
from typing import Any

from deltazoo.generation.row_table import has_softmax_layers
from deltazoo.models import DeltaRuleForCausalLM

__all__ = ["context_limit_of", "end_tokens_of", "unlimited"]


def unlimited(model: Any) -> bool:
    """Whether a model takes any number of tokens: our own without softmax layers, which read no positions."""
    return isinstance(model, DeltaRuleForCausalLM) and not has_softmax_layers(model)


def context_limit_of(model: Any, given: int | None) -> int | None:
    """Most tokens of prompt and answer, None for any number; ValueError for more than the model has positions."""
    if unlimited(model):
        return given
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if given is not None and longest is not None and given > longest:
        raise ValueError(
            f"context_limit must be at most the max_position_embeddings={longest} of the model's configuration, "
            f"got {given}"
        )
    return longest if given is None else given


def end_tokens_of(model: Any, tokenizer: Any, given: int | Sequence[int] | None) -> frozenset[int]:
    """Tokens that end an answer: those given, else the model's, else the tokenizer's."""
    for ends in (given, model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()
