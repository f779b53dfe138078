"""The argument that takes a cache, by the name that the installed transformers has, and arguments that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_models import mixer_of
from model_kinds import KINDS, model_of_kind
from tiny_models import tokens
from torch import nn
from transformers import DynamicCache

from deltazoo.generation.cache import CACHE, takes_cache
from deltazoo.models.block import DeltaRuleBlock
from deltazoo.models.softmax_attention import SoftmaxAttention
from deltazoo.swap.layer import SwappedAttention

IDS = tokens(2, 12)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of_kind(request.param)


@torch.no_grad()
def test_a_cache_by_the_name_of_the_installed_version(model: Any) -> None:
    first = model(IDS[:, :7], use_cache=True)
    later = model(IDS[:, 7:], **{CACHE: getattr(first, CACHE)})
    torch.testing.assert_close(later.logits, model(IDS).logits[:, 7:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_old_name_is_taken_with_a_warning(model: Any) -> None:
    """Before transformers 5.24 it is the only one, and the new one is an error."""
    first = model(IDS[:, :7], use_cache=True)
    cache = getattr(first, CACHE)
    if CACHE == "cache":
        with pytest.warns(FutureWarning, match="Use `cache` instead"):
            later = model(IDS[:, 7:], past_key_values=cache)
        torch.testing.assert_close(later.logits, model(IDS).logits[:, 7:], rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(TypeError, match="'cache'"):
            model(IDS[:, 7:], cache=cache)


@pytest.mark.skipif(CACHE != "cache", reason="this version of transformers has one name")
def test_the_warning_names_the_line_of_the_caller(model: Any) -> None:
    cache = model(IDS[:, :7], use_cache=True).cache
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated") as said:
        model.prepare_inputs_for_generation(IDS[:, 7:], past_key_values=cache)
        model.generate(IDS, past_key_values=cache, max_new_tokens=1)
    assert [warning.filename for warning in said] == 2 * [__file__]


@pytest.mark.skipif(CACHE != "cache", reason="this version of transformers has one name")
def test_two_caches_are_refused(model: Any) -> None:
    """As PEFT's prefix tuning hands them over. A head of transformers drops one, with a warning of its own."""
    caches = {name: DynamicCache(config=model.config) for name in ("cache", "past_key_values")}
    with pytest.raises(ValueError, match="Both `past_key_values` and `cache` are set|are two caches"):
        model.base_model(IDS, **caches)
    if "deltazoo" in type(model).forward.__module__:
        with pytest.raises(ValueError, match="Both `past_key_values` and `cache` are set"):
            model(IDS, **caches)
    else:
        with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache` are set"):
            model(IDS, **caches)


@pytest.mark.parametrize("name", ["past_key_value", "cache_parameters", "state", "padding_mask", "cu_seq_lens"])
def test_an_unknown_argument_is_refused(model: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name!r}"):
        model(IDS, **{name: torch.ones(2)})


def test_later_tokens_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="is_causal=False asks for attention to later tokens"):
        model(IDS, is_causal=False)


def linear_layer(model: Any) -> nn.Module:
    layers = [x for x in model.modules() if isinstance(x, SwappedAttention)]
    return layers[0] if layers else mixer_of(model)


@pytest.mark.parametrize("kind", ["swapped", "accelerated"])
@pytest.mark.parametrize("name", ["layer_past", "past_key_value", "mask", "cu_seq_lens"])
def test_a_layer_refuses_what_it_would_drop(kind: str, name: str) -> None:
    """As when transformers renames an argument: the layer computes nothing rather than something else."""
    layer = linear_layer(model_of_kind(kind))
    x = torch.randn(2, 5, 32 if kind == "accelerated" else layer.delta.hidden_size)
    with pytest.raises(TypeError, match=f"{name!r}, which it does not know"):
        layer(x, **{name: DynamicCache()})
    assert layer(x, **{name: None}) is not None


@pytest.mark.parametrize("told", [{"attention_mask": torch.ones(2, 1, 5, 5)}, {"cu_seq_lens_q": torch.tensor([0, 5])}])
def test_a_swapped_layer_needs_the_description_of_its_batch(told: dict[str, Any]) -> None:
    layer: Any = linear_layer(model_of_kind("swapped"))
    with pytest.raises(ValueError, match=f"was given {next(iter(told))}, and no model around it has described"):
        layer(torch.randn(2, 5, layer.delta.hidden_size), **told)


@pytest.mark.parametrize("part", [DeltaRuleBlock, SoftmaxAttention])
def test_parts_of_a_hybrid_know_no_other_name(part: type[nn.Module]) -> None:
    module = next(x for x in model_of_kind("hybrid").modules() if isinstance(x, part))
    with pytest.raises(TypeError, match="past_key_value"):
        module(torch.randn(1, 2, 32), None, past_key_value=DynamicCache())


def test_a_parameter_of_another_old_name() -> None:
    class Layer:
        @takes_cache("cache_params")
        def forward(self, x: int, cache: Any = None, **kwargs: Any) -> Any:
            return x, cache, kwargs

    new_name = "cache" if CACHE == "cache" else "cache_params"
    assert Layer().forward(1, **{new_name: 2}) == (1, 2, {}) == Layer().forward(1, 2)
