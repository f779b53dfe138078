"""Decoding speed and state size of a model."""

import time
from typing import Any

import torch

from benchmarks.result_files import one_line
from deltazoo.generation import Decoder, snapshot
from deltazoo.generation.cache_argument import CACHE
from deltazoo.models import DeltaRuleForCausalLM
from experiments.text.text_recipe import TextRecipe

__all__ = ["decoding", "state_bytes"]

_WARM_UP = 4
"""Tokens before the clock starts; the second one captures the step."""


@torch.no_grad()
def state_bytes(model: DeltaRuleForCausalLM, tokens: int) -> int:
    """Memory of what a row of so many tokens leaves for the next one: states, or keys and values."""
    output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=model.device), use_cache=True)
    return snapshot(getattr(output, CACHE)).nbytes


def decoding(
    model: DeltaRuleForCausalLM, recipe: TextRecipe, prompt: torch.Tensor, prompt_at_once: int = 2**16
) -> dict[str, dict[str, Any]]:
    """By batch size `tokens_per_second`, new tokens of all rows together, or `error`, why there is no figure.

    Args:
        model: in evaluation mode, in the dtype that is to be timed.
        recipe: batches, tokens of context, tokens that are timed.
        prompt: `[T]` int64 tokens, of which every row reads the first `decode_context`.
        prompt_at_once: tokens of all rows' prompts in one forward pass; softmax layers make a mask over them.
    """
    return {str(batch): _speed(model, recipe, prompt, batch, prompt_at_once) for batch in recipe.decode_batches}


def _speed(
    model: DeltaRuleForCausalLM, recipe: TextRecipe, prompt: torch.Tensor, batch: int, prompt_at_once: int
) -> dict[str, Any]:
    try:
        decoder = Decoder(
            model,
            batch,
            max_length=recipe.decode_context + _WARM_UP + recipe.decode_tokens,
            prefill_chunk=max(1, prompt_at_once // batch),
            eos_token_id=(),
        )
        ids = prompt[: recipe.decode_context].expand(batch, -1).contiguous()
        began = 0.0
        for made, _ in enumerate(decoder.stream(ids, max_new_tokens=_WARM_UP + recipe.decode_tokens), start=1):
            if made == _WARM_UP:
                began = time.perf_counter()
        seconds = time.perf_counter() - began
    except Exception as error:  # a training of minutes must not be lost for a speed
        return {"error": one_line(error)}
    return {"tokens_per_second": round(batch * recipe.decode_tokens / seconds, 1)}
