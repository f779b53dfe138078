"""Generation with swapped models: beams, caches, compiled, exported. tests/models/test_generation.py has the tokens."""

import pytest
import torch
from tiny_families import VOCAB, precise, tiny_original, tokens
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import deltazoo
from deltazoo.models import DeltaRuleCacheLayer

FEW = ["llama", "gemma3_text", "gpt_neox"]
"""One mask for all layers, masks by layer type with windows, another name for the cache."""


def swapped(family, layers="1:1", rule="gated_deltanet"):
    model = precise(family, tiny_original(family))
    deltazoo.swap_attention(model, rule, layers)
    return model


def prompt():
    """Two rows, one padded on the left beyond every window; no token can end the text."""
    ids = tokens(2, 10)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :7] = 0
    return {"input_ids": torch.where(mask.bool(), ids, VOCAB - 1), "attention_mask": mask}


def generate(model, **options):
    inputs = options.pop("inputs", None) or prompt()
    length = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, **options)[:, length:]


@pytest.mark.parametrize("family", FEW)
def test_beams(family):
    model = swapped(family)
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(model, **options), generate(model, **options, use_cache=False))


@pytest.mark.parametrize("with_config", [True, False])
def test_users_own_cache_is_prepared_in_place(with_config):
    model, ids = swapped("qwen3", [0, 2]), tokens(2, 6)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    with torch.no_grad():
        assert model(ids, past_key_values=cache).past_key_values is cache
    ours = [isinstance(layer, DeltaRuleCacheLayer) for layer in cache.layers]
    assert ours == [True, False, True, False]
    assert cache.get_seq_length() == 6


def test_cache_of_a_fully_swapped_model_does_not_grow():
    model = swapped("mistral", "all")

    def num_bytes(length):
        with torch.no_grad():
            cache = model(tokens(1, length)).past_key_values
        return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.state if x is not None)

    assert num_bytes(4) == num_bytes(50)


def test_cache_of_the_unswapped_model_is_refused():
    original, model, ids = tiny_original("llama").double(), swapped("llama"), tokens(1, 4)
    cache = original(ids).past_key_values
    with pytest.raises(ValueError, match="holds a used DynamicLayer there: it belongs to another model"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 3]), ("gemma3_text", "all")])
def test_compiled_decoding_never_traces_again(family, layers):
    """One graph serves every length; the logits are those of the full forward pass."""
    model, ids = swapped(family, layers), tokens(2, 3)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        compiled = torch.compile(model, backend=count, fullgraph=True)
        for step in range(3):
            ids = torch.cat([ids, tokens(2, 1, seed=step)], dim=1)
            logits = compiled(ids[:, -1:].contiguous(), past_key_values=cache).logits
            expected = model(ids, use_cache=False).logits[:, -1:]
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()
    assert len(graphs) == 1


@pytest.mark.parametrize("layers", ["all", [0, 2], [3]], ids=str)
def test_fewer_layers(layers, tmp_path):
    model = swapped("llama", layers)
    model.save_pretrained(tmp_path)
    first = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    model.config.num_hidden_layers = 2  # transformers' models then run their first two layers
    assert torch.equal(generate(first), generate(model))


def test_a_swapped_model_is_exported_for_any_size():
    model = swapped("llama")
    model.config.use_cache = False
    sizes = {"input_ids": {0: torch.export.Dim("B", min=2, max=100), 1: torch.export.Dim("T", min=2, max=1000)}}
    program = torch.export.export(model, (), {"input_ids": tokens(3, 9)}, dynamic_shapes=sizes, strict=False)
    ids = tokens(2, 14)
    torch.testing.assert_close(program.module()(input_ids=ids).logits, model(ids).logits)
