"""Decoding after a context: the bytes of the cache are counted exactly."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from deltazoo.swap import swap_attention
from deltazoo.workbench.evaluate.long_context import cache_bytes, measure_decoding


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))


def test_a_softmax_cache_is_two_tensors_per_layer() -> None:
    model = llama()
    cache = DynamicCache(config=model.config)
    model(torch.randint(50, (1, 30)), past_key_values=cache)
    assert cache_bytes(cache) == 2 * 2 * 30 * 32 * 4


def test_decoding_is_timed_and_the_cache_counted() -> None:
    found = measure_decoding(llama(), 20, decoded=3, piece=8)
    # The context, two tokens that are not timed and three that are.
    assert found.cache_bytes == 2 * 2 * 25 * 32 * 4
    assert found.context == 20
    assert found.tokens_per_second > 0
    assert found.peak_bytes is None


def test_the_cache_of_a_swapped_model_does_not_grow() -> None:
    model = llama()
    swap_attention(model, "gated_deltanet")
    short, long = (measure_decoding(model, context, decoded=1) for context in (10, 40))
    assert short.cache_bytes == long.cache_bytes
