"""Every recompute level gives the same gradients, and each keeps less than the one before it."""

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch.profiler import ProfilerActivity, profile

from deltazoo.models import DeltaRuleConfig
from deltazoo.models.recompute import LEVELS

CASES = ["gated_deltanet", "kda", "hybrid", "without_conv"]


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same(case, level):
    ids = tokens(2, 70)
    expected = loss_and_gradients(tiny_model(case).train(), ids)
    actual = loss_and_gradients(tiny_model(case, recompute=level).train(), ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_packed_documents_and_padding(level):
    for shape, kwargs in [
        ((1, 30), {"cu_seqlens": torch.tensor([0, 7, 8, 30])}),
        ((2, 9), {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])}),
    ]:
        expected = loss_and_gradients(tiny_model("gated_deltanet").train(), tokens(*shape), **kwargs)
        model = tiny_model("gated_deltanet", recompute=level).train()
        torch.testing.assert_close(loss_and_gradients(model, tokens(*shape), **kwargs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_with_gradient_checkpointing(level, reentrant):
    ids = tokens(2, 20)
    expected = loss_and_gradients(tiny_model("hybrid").train(), ids)
    model = tiny_model("hybrid", recompute=level).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(loss_and_gradients(model, ids), expected, rtol=0, atol=0)


def kept_bytes(level, layers, gradient_checkpointing=False):
    """What a forward pass in training leaves allocated for the backward pass, bytes per token."""
    ids = tokens(2, 256)
    # 512 tokens: what is kept per sequence and not per token hardly counts.
    model = tiny_model("gated_deltanet", recompute=level, num_hidden_layers=layers, hidden_size=64).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model(ids, labels=ids)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = model(ids, labels=ids).loss
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages()) / ids.numel()


def kept_per_layer(level, **options):
    return (kept_bytes(level, 3, **options) - kept_bytes(level, 1, **options)) / 2


def test_each_level_keeps_less():
    """A block keeps its input, 64 numbers a token, and some state per sequence; `none` keeps a hundred times that."""
    kept = {level: kept_per_layer(level) for level in LEVELS}
    assert kept["elementwise"] < 0.6 * kept["none"]
    assert kept["block"] < 0.2 * kept["elementwise"]
    assert kept_per_layer("none", gradient_checkpointing=True) <= kept["block"] * 1.1


def test_evaluation_and_caches_keep_their_own_way():
    model = tiny_model("hybrid", recompute="elementwise")
    plain, ids = tiny_model("hybrid"), tokens(1, 8)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    for one in (model, plain):
        one.cache = one(ids[:, :5], use_cache=True).past_key_values
        one.train()
    logits = [one(ids[:, 5:], past_key_values=one.cache, use_cache=True).logits for one in (model, plain)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert model.cache.get_seq_length() == 8
    assert model(ids).past_key_values is None


def test_unknown_levels_are_refused():
    with pytest.raises(ValueError, match="did you mean 'elementwise'"):
        DeltaRuleConfig(recompute="elementwize")


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    ids, model = tokens(2, 20), tiny_model("gated_deltanet", recompute="elementwise").train()
    expected = loss_and_gradients(model, ids)
    expected = expected[0], {name: grad.clone() for name, grad in expected[1].items()}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    actual = loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()
