"""Generation with swapped models: beams, caches, compiled, exported. tests/models/test_generation.py has the tokens."""

from functools import partial

import pytest
import tiny_families
import torch
from decoding_loops import assert_one_graph_decodes
from tiny_families import VOCAB, tokens
from transformers import AutoModelForCausalLM, DynamicCache

from deltazoo.models import DeltaRuleCacheLayer

FEW = ["llama", "gemma3_text", "gpt_neox"]
"""One mask for all layers, masks by layer type with windows, another name for the cache."""
swapped = partial(tiny_families.swapped, exact=True)


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


@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 3]), ("gemma3_text", "all")])
def test_compiled_decoding_never_traces_again(family, layers):
    assert_one_graph_decodes(swapped(family, layers), tokens(2, 3), tokens(2, 3, seed=1), rtol=1e-9, atol=1e-9)


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
