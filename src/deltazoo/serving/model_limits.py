"""What an engine may ask of a model: how many tokens and prompts at once, and which tokens end an answer."""

from collections.abc import Sequence
from typing import Any

from deltazoo.generation.conditions import max_positions
from deltazoo.generation.row_table import has_softmax_layers
from deltazoo.models import DeltaRuleForCausalLM

__all__ = ["context_limit_of", "end_tokens_of", "sizes_of_passes", "unlimited"]

_SIZES = (1, 2, 4, 8, 16)
"""Prompts in one pass on a GPU. A pass of 16 takes less time per prompt than one of 8, and steps wait for it longer."""
_SIZES_WITH_KEYS = (1, 2, 4)
"""The same with softmax layers, which reserve keys and values of the whole context for each of them."""
_ONLY_SIZE = 8
"""The largest where requests are to be computed at one size only."""


def unlimited(model: Any) -> bool:
    """Whether a model takes any number of tokens: our own without softmax layers, which read no positions."""
    return isinstance(model, DeltaRuleForCausalLM) and not has_softmax_layers(model)


def context_limit_of(model: Any, given: int | None) -> int | None:
    """Most tokens of prompt and answer, None for any number; ValueError for more than the model has positions."""
    if unlimited(model):
        return given
    longest = max_positions(model)
    if given is not None and longest is not None and given > longest:
        raise ValueError(
            f"context_limit must be at most the max_position_embeddings={longest} of the model's configuration, "
            f"got {given}"
        )
    return longest if given is None else given


def sizes_of_passes(model: Any, *, several: bool) -> tuple[int, ...]:
    """Numbers of prompts in one pass on a GPU; one number unless there may be several.

    Experts multiply the tokens of all prompts together, so that one prompt's results would depend on the others.
    """
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        return (1,)
    sizes = _SIZES if unlimited(model) else _SIZES_WITH_KEYS
    return sizes if several else (min(sizes[-1], _ONLY_SIZE),)


def end_tokens_of(model: Any, tokenizer: Any, given: int | Sequence[int] | None) -> frozenset[int]:
    """Tokens that end an answer: those given, else the model's, else the tokenizer's."""
    for ends in (given, model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()
