"""An accelerated model computes what transformers' own torch code computes: that code, on a CPU, is the judge."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from foreign_models import FUSED, SPARSE_SOFTMAX, assert_equal_but_for_rounding, foreign_model, mixer_of, tokens
from helpers import record_precision
from transformers import DynamicCache

import deltazoo
from deltazoo.layers import rule


def logits_and_gradients(ids):
    def run(model):
        model = copy.deepcopy(model).train()
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": output.logits.detach(), **gradients}

    return run


def accelerated(model):
    model = copy.deepcopy(model)
    deltazoo.accelerate(model)
    return model


@pytest.mark.parametrize("family", FUSED)
def test_logits_and_all_gradients(family):
    theirs, run = foreign_model(family), logits_and_gradients(tokens(2, 70))
    assert_equal_but_for_rounding(run, theirs, run(accelerated(theirs)))


@pytest.mark.parametrize("family", FUSED)
def test_fast_precision_where_no_gain_exceeds_one(family, monkeypatch):
    """Step sizes of OLMo Hybrid reach 2."""
    asked = record_precision(monkeypatch, rule)
    accelerated(foreign_model(family))(tokens(1, 3))
    assert set(asked) == {None if family == "olmo_hybrid" else "fast"}


@pytest.mark.parametrize("family", FUSED)
def test_bfloat16_is_as_exact_as_theirs(family):
    """The layer alone (in a whole model a router's choice may flip on the last bit): at most twice the error of theirs.

    Over eight inputs together, since a decay's gradient is a handful of numbers in which errors may happen to cancel.
    """
    theirs = mixer_of(foreign_model(family, torch.bfloat16))
    ours = mixer_of(accelerated(foreign_model(family, torch.bfloat16)))
    exact = copy.deepcopy(theirs).float()
    torch.manual_seed(0)
    x, weights = torch.randn(2, 8, 2, 70, 32).bfloat16()

    def run(layer, dtype=torch.bfloat16):
        results = defaultdict(list)
        for x_i, weights_i in zip(x.to(dtype, copy=True), weights.to(dtype), strict=True):
            layer.zero_grad()
            x_i.requires_grad_()
            results["output"].append(layer(x_i))
            results["output"][-1].backward(weights_i)
            results["input"].append(x_i.grad)
            for name, parameter in layer.named_parameters():
                results[name].append(parameter.grad)
        return {name: torch.stack(parts).float() for name, parts in results.items()}

    expected, actual, plain = run(exact, torch.float32), run(ours), run(theirs)
    for name, reference in expected.items():
        error, allowed = ((result[name] - reference).norm() for result in (actual, plain))
        floor = torch.finfo(torch.bfloat16).eps / 2 * reference.norm()
        assert error <= 2 * allowed + floor, f"{name}: {error:.2e}, theirs {allowed:.2e}"


def token_by_token(ids, splits, **kwargs):
    """Logits of a sequence fed in pieces."""

    def run(model):
        with torch.no_grad():
            cache, pieces = None, []
            for piece in ids.split(splits, dim=1):
                output = model(input_ids=piece, past_key_values=cache, use_cache=True, **kwargs)
                cache = output.past_key_values
                pieces.append(output.logits)
        return {"logits": torch.cat(pieces, dim=1)}

    return run


@pytest.mark.parametrize("splits", [[1, 1, 2, 30, 1, 1, 5], [40, 1]], ids=["short_first", "long_first"])
@pytest.mark.parametrize("family", FUSED)
def test_cached_steps_and_further_prompts(family, splits):
    theirs, run = foreign_model(family), token_by_token(tokens(2, sum(splits)), splits)
    assert_equal_but_for_rounding(run, theirs, run(accelerated(theirs)))


@pytest.mark.parametrize("family", FUSED)
def test_a_cache_outlives_the_switch(family):
    """An accelerated layer writes the same states to the cache as its original."""
    theirs, ids = foreign_model(family), tokens(2, 9)
    ours = accelerated(theirs)
    caches = []
    with torch.no_grad():
        for model in (theirs, ours):
            cache = model(input_ids=ids[:, :7], use_cache=True).past_key_values
            model(input_ids=ids[:, 7:8], past_key_values=cache)
            caches.append(cache.layers[0])
    for name in ("conv_states", "recurrent_states"):
        expected, left = (getattr(cache, name)[0] for cache in caches)
        assert left.dtype == expected.dtype
        torch.testing.assert_close(left, expected)


GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in FUSED for mode in GENERATION if mode == "beams" or family in SPARSE_SOFTMAX],
)
def test_generate_with_left_padding(family, mode):
    """Greedy tokens of the others are those of the forward pass: tests/models/test_generation.py."""
    theirs, ids = foreign_model(family), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids = ids.masked_fill(mask == 0, 0)
    ours = accelerated(theirs)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, **GENERATION[mode]}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("padding", ["left", "right", "middle"])
@pytest.mark.parametrize("family", FUSED)
def test_padding_leaves_no_trace(family, padding):
    """The layer on padded rows, and later tokens with its cache, equal the row without padding (theirs: left only)."""
    model = accelerated(foreign_model(family))
    mixer, config = mixer_of(model), model.config.get_text_config()
    torch.manual_seed(0)
    x, further = torch.randn(2, 12, 32), torch.randn(2, 3, 32)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, {"left": slice(0, 5), "right": slice(7, 12), "middle": slice(4, 9)}[padding]] = 0
    with torch.no_grad():
        cache = DynamicCache(config=config)
        output = mixer(x, cache_params=cache, attention_mask=mask)
        more = torch.cat([mixer(further[:, :2], cache_params=cache), mixer(further[:, 2:], cache_params=cache)], dim=1)
        for row in range(2):
            alone = DynamicCache(config=config)
            real = mask[row].bool()
            torch.testing.assert_close(output[row, real], mixer(x[row : row + 1, real], cache_params=alone)[0])
            assert not output[row, ~real].any()
            torch.testing.assert_close(more[row], mixer(further[row : row + 1], cache_params=alone)[0])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its successor is too new
@pytest.mark.parametrize("family", FUSED)
def test_gradient_checkpointing(family):
    model, ids = accelerated(foreign_model(family)), tokens(2, 20)
    plain = logits_and_gradients(ids)(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, x in logits_and_gradients(ids)(model).items():
        torch.testing.assert_close(x, plain[name], msg=name)
