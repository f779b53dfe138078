"""`torch.compile(fullgraph=True)` of whole models: one graph, equal results, and no new graph for every length.

The tracing is what can break; it runs here without code generation (`aot_eager`).
"""

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

pytestmark = pytest.mark.slow

LENGTHS = (70, 71, 64, 130)
"""Around a chunk of 64 tokens: a little more, as much, and more than two."""


def traced(model, **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def loss_and_gradients(model, run, ids, **kwargs):
    model.zero_grad()
    loss = run(ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_training_with_lengths_that_vary():
    """Two graphs for four lengths: the first one's own, and one for all."""
    model = tiny_model("hybrid_kda").train()
    compiled, counter = traced(model)
    for length in LENGTHS:
        ids = tokens(2, length)
        torch.testing.assert_close(loss_and_gradients(model, compiled, ids), loss_and_gradients(model, model, ids))
    assert counter.frame_count <= 2


def test_training_with_a_length_declared_dynamic():
    """No length after the first is traced again."""
    model = tiny_model("efla", num_hidden_layers=1).train()
    compiled, counter = traced(model, dynamic=True)
    frames = []
    for length in LENGTHS:
        ids = tokens(2, length)
        torch.testing.assert_close(loss_and_gradients(model, compiled, ids), loss_and_gradients(model, model, ids))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * len(LENGTHS)


def test_inference_with_lengths_that_vary():
    model = tiny_model("gated_deltanet", num_hidden_layers=1)
    compiled, counter = traced(model)
    with torch.no_grad():
        for length in LENGTHS:
            ids = tokens(2, length)
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert counter.frame_count <= 2


def test_padding_with_lengths_that_vary():
    model = tiny_model("hybrid")
    compiled, counter = traced(model)
    with torch.no_grad():
        for length in LENGTHS:
            ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
            mask[1, :7] = 0
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            actual = compiled(ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
    assert counter.frame_count <= 2


def test_packed_documents_with_lengths_that_vary():
    model = tiny_model("kda_without_conv", num_hidden_layers=1).train()
    compiled, counter = traced(model)
    for length in LENGTHS:
        ids, bounds = tokens(1, length), torch.tensor([0, 5, 12, length], dtype=torch.int32)
        kwargs = {"cu_seqlens": bounds}
        torch.testing.assert_close(
            loss_and_gradients(model, compiled, ids, **kwargs), loss_and_gradients(model, model, ids, **kwargs)
        )
    assert counter.frame_count <= 2


def test_generation_with_a_compiled_forward_pass():
    """As in transformers' guide: prompts, padded or not, are compiled in one graph too."""
    model, ids = tiny_model("hybrid", num_heads=1), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(ids, attention_mask=given, **options) for given in (None, mask)]
    model.forward, counter = traced(model.forward)
    for given, tokens_of_uncompiled in zip((None, mask), expected, strict=True):
        generated = model.generate(ids, attention_mask=given, cache_implementation="static", **options)
        assert torch.equal(generated, tokens_of_uncompiled)
    assert counter.frame_count <= 4


def test_packed_documents_and_a_cache_are_refused_in_compiled_code_too():
    model, ids = tiny_model("gated_deltanet", num_hidden_layers=1), tokens(1, 8)
    compiled, _ = traced(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(RuntimeError, match="packed documents cannot fill or continue a cache"), torch.no_grad():
        compiled(ids, position_ids=torch.arange(8)[None] % 4, past_key_values=cache)
