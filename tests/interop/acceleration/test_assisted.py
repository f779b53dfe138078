"""Assisted decoding and prompt lookup of accelerated models, which transformers refuses for its own."""

import pytest
import torch
from foreign_models import FUSED, SPARSE_SOFTMAX, foreign_model, mixer_of, tokens
from transformers import DynamicCache

import deltazoo

FAMILIES = [family for family in FUSED if family not in SPARSE_SOFTMAX]


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=-1, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [2, 6])
@pytest.mark.feature("assisted decoding")
def test_tokens_are_those_of_greedy_decoding(family, length):
    """Also after prompts shorter than the convolution."""
    model, ids = foreign_model(family), tokens(1, length).repeat(1, 3)[:, -max(length, 2) :]
    deltazoo.accelerate(model)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4), expected)
    assert torch.equal(generate(model, ids, assistant_model=model), expected)


def test_assistants_of_other_libraries():
    model, assistant = foreign_model("qwen3_5"), foreign_model("qwen3_next")
    ids = tokens(1, 6)
    expected = generate(model, ids)
    for one in (model, assistant):
        deltazoo.accelerate(one)
    assert torch.equal(generate(model, ids, assistant_model=assistant), expected)


def recorded(model, ids, recorded_from=0):
    """A cache of these tokens, which records those after `recorded_from`, and its delta-rule layer."""
    cache = DynamicCache(config=model.config)
    if recorded_from:
        model(ids[:, :recorded_from], past_key_values=cache)
    cache.activate_past_recording()
    for piece in ids[:, recorded_from:].split(2, dim=1):
        model(piece, past_key_values=cache)
    return cache, cache.layers[mixer_of(model).layer_idx]


@torch.no_grad()
@pytest.mark.feature("tokens taken back (crop)")
def test_a_layer_is_cropped_to_a_length():
    """As transformers 5.14 crops the cache of an assistant."""
    model, ids = foreign_model("qwen3_next"), tokens(1, 9)
    deltazoo.accelerate(model)
    cache, layer = recorded(model, ids)
    for length in (6, 7):
        cache.layers[1].crop(length - 9)
        layer.crop(length)
        _, expected = recorded(model, ids[:, :length])
        torch.testing.assert_close(layer.recurrent_states[0], expected.recurrent_states[0])
        torch.testing.assert_close(layer.window, expected.window)
        model(ids[:, length:], past_key_values=cache)

    _, layer = recorded(model, ids, recorded_from=4)
    with pytest.raises(RuntimeError, match="the length of this recurrent state is unknown"):
        layer.crop(6)


def test_restored_models_refuse_again():
    model, ids = foreign_model("qwen3_next"), tokens(1, 6)
    deltazoo.accelerate(model)
    deltazoo.restore(model)
    assert "_is_stateful" not in vars(model)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(model, ids, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("family", [family for family in FUSED if family in SPARSE_SOFTMAX])
def test_sparse_softmax_layers_cannot_go_back(family):
    model = foreign_model(family)
    deltazoo.accelerate(model)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(model, tokens(1, 6), prompt_lookup_num_tokens=4)
