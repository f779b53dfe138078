"""Every refusal and promise of our models, kept by every kind: pure and hybrid, swapped, accelerated."""

from __future__ import annotations

from typing import Any

import foreign_models
import pytest
import torch
from tiny_families import tiny_original
from tiny_models import tiny_model, tokens

import deltazoo


def _swapped() -> Any:
    model = tiny_original("llama")
    deltazoo.swap_attention(model, "gated_deltanet", "1:1")
    return model


def _accelerated() -> Any:
    model = foreign_models.foreign_model("qwen3_5")
    deltazoo.accelerate(model)
    return model


KINDS = {
    "own": lambda: tiny_model("gated_deltanet"),
    "hybrid": lambda: tiny_model("hybrid"),
    "swapped": _swapped,
    "accelerated": _accelerated,
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def greedy(model: Any, **options: Any) -> Any:
    return model.generate(max_new_tokens=4, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("way", ["assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"])
def test_assisted_decoding_is_refused(model: Any, way: str) -> None:
    """By transformers, before anything has changed."""
    ids, layers = tokens(1, 8), model.config.num_hidden_layers
    before = model(ids, use_cache=False).logits
    with pytest.raises(ValueError, match=f"not supported with stateful models, such as {type(model).__name__}"):
        greedy(model, inputs=ids, **{way: KINDS["hybrid"]() if way == "assistant_model" else 1})
    assert model.config.num_hidden_layers == layers
    assert torch.equal(model(ids, use_cache=False).logits, before)


def test_assisting_another_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} has delta-rule layers.*cannot be the assistant"):
        greedy(tiny_original("llama"), inputs=tokens(1, 8), assistant_model=model)


def test_a_cache_that_should_take_tokens_back_is_refused(model: Any) -> None:
    ids = tokens(1, 8)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    with pytest.raises(RuntimeError, match="cannot take tokens back|does not track past states"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match="cannot take tokens back"):
        cache.activate_past_recording()
        model(ids[:, :1], past_key_values=cache)
