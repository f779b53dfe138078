import copy
from functools import partial

import pytest
import torch
from decoding_loops import assert_one_graph_decodes
from tiny_models import FEW, STATES, tiny_config, tiny_model, tokens
from torch.export.graph_signature import InputKind
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from deltazoo.models import DeltaRuleCacheLayer


def filled(model, ids, cache=None):
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).past_key_values


def next_logits(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def delta_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, DeltaRuleCacheLayer)]


def num_bytes(cache):
    tensors = [t for layer in delta_layers(cache) for t in layer.state if t is not None]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("case", STATES)
def test_size_does_not_depend_on_length(case):
    model = tiny_model(case)
    short, long = filled(model, tokens(2, 5)), filled(model, tokens(2, 90))
    for _ in range(3):
        long = filled(model, tokens(2, 1), long)
    assert num_bytes(long) == num_bytes(short)
    assert [layer.get_seq_length() for layer in delta_layers(long)] == [93] * len(delta_layers(long))


@pytest.mark.parametrize("case", FEW)
def test_recurrent_state_is_float32_in_a_bfloat16_model(case):
    model = tiny_model(case).to(torch.bfloat16)
    cache = filled(model, tokens(2, 1), filled(model, tokens(2, 5)))
    assert {layer.state.recurrent.dtype for layer in delta_layers(cache)} == {torch.float32}


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("with_config", [True, False])
def test_users_own_dynamic_cache(case, with_config):
    model, ids = tiny_model(case), tokens(2, 6)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    assert filled(model, ids, cache) is cache
    assert type(cache) is DynamicCache
    torch.testing.assert_close(
        next_logits(model, cache, ids[:, :2]), next_logits(model, None, torch.cat([ids, ids[:, :2]], 1))[:, -2:]
    )


@pytest.mark.parametrize("case", [*FEW, "pkda"])  # whose rule keeps a further state
@pytest.mark.parametrize("static", [False, True])
def test_rows_follow_reorder(case, static):
    model, ids, more = tiny_model(case), tokens(3, 6), tokens(3, 2, seed=1)
    cache = filled(model, ids, StaticCache(config=model.config, max_cache_len=16) if static else None)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    expected = next_logits(model, filled(model, ids[order]), more)
    torch.testing.assert_close(next_logits(model, cache, more), expected)


@pytest.mark.parametrize("case", [*FEW, "pkda"])  # whose rule keeps a further state
def test_rows_are_selected_and_repeated(case):
    model, ids = tiny_model(case), tokens(3, 6)
    cache = filled(model, ids)
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.batch_repeat_interleave(2)
    rows, more = torch.tensor([1, 1, 2, 2]), tokens(4, 2, seed=1)
    torch.testing.assert_close(next_logits(model, cache, more), next_logits(model, filled(model, ids[rows]), more))


@pytest.mark.parametrize("case", [*FEW, "pkda"])  # whose rule keeps a further state
@pytest.mark.parametrize("static", [False, True])
def test_reset_forgets(case, static):
    model, ids, other = tiny_model(case), tokens(2, 6), tokens(2, 6, seed=1)
    cache = filled(model, other, StaticCache(config=model.config, max_cache_len=16) if static else None)
    cache.reset()
    assert {int(layer.get_seq_length()) for layer in delta_layers(cache)} == {0}
    if not static:
        # Softmax layers are not ours: older versions of transformers leave zeros in place of their keys.
        cache.layers = [layer if layer in delta_layers(cache) else DynamicLayer() for layer in cache.layers]
    torch.testing.assert_close(next_logits(model, cache, ids), next_logits(model, None, ids))


def test_a_fixed_count_outlives_a_reset():
    model = tiny_model("delta_net")
    cache = filled(model, tokens(2, 6), StaticCache(config=model.config, max_cache_len=16))
    for layer in delta_layers(cache):
        layer.fix_count(torch.tensor(5))
    cache.reset()
    next_logits(model, cache, tokens(2, 3))
    assert {int(layer.get_seq_length()) for layer in delta_layers(cache)} == {5}


@pytest.mark.parametrize("static", [False, True])
def test_tokens_cannot_be_taken_back(static):
    model, ids = tiny_model("gated_deltanet"), tokens(1, 4)
    cache = filled(model, ids, StaticCache(config=model.config, max_cache_len=8) if static else None)
    for refused in (cache.activate_past_recording, partial(cache.crop, -1), partial(cache.crop, 2)):
        with pytest.raises(RuntimeError, match=r"cannot take tokens back.*take a deltazoo\.generation\.snapshot"):
            refused()
    assert cache.get_seq_length() == 4

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="neither records tokens nor crops them"):
        filled(model, ids, cache)


def test_a_cache_of_other_types_of_layers():
    """Caches of other sizes: models/test_promises_of_all_kinds.py."""
    with pytest.raises(ValueError, match="belongs to another model"):
        filled(tiny_model("hybrid_softmax_first"), tokens(1, 4), filled(tiny_model("hybrid"), tokens(1, 4)))


@pytest.mark.parametrize("case", ["hybrid", *(pytest.param(x, marks=pytest.mark.slow) for x in FEW if x != "hybrid")])
def test_compiled_decoding_never_traces_again(case):
    assert_one_graph_decodes(tiny_model(case), tokens(2, 5), tokens(2, 12, seed=1), rtol=1e-4, atol=1e-4)


def test_use_cache():
    model, ids = tiny_model("gated_deltanet"), tokens(1, 4)
    assert model(ids).past_key_values is not None
    assert model(ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(ids).past_key_values is None
    assert tiny_config("gated_deltanet").use_cache


@pytest.mark.parametrize("case", ["delta_net", "hybrid", "hybrid_softmax_first"])
def test_layers_of_a_static_cache_count_together(case):
    model = tiny_model(case)
    cache = StaticCache(config=model.config, max_cache_len=16)
    for length, total in ((5, 5), (1, 6), (3, 9)):
        filled(model, tokens(2, length), cache)
        assert [int(layer.get_seq_length()) for layer in cache.layers] == [total] * len(cache.layers)
    cache.reset()
    filled(model, tokens(2, 2), cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [2] * len(cache.layers)


@pytest.mark.parametrize("case", ["gated_deltanet", "kda_without_conv"])
def test_an_exported_step_has_as_many_inputs_as_states(case):
    """torch.export takes a cache apart by following every reference; each state is one input, once."""
    exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")  # older versions have none
    num_layers = 5
    model = tiny_model(case, num_hidden_layers=num_layers)
    cache = filled(model, tokens(1, 4), DynamicCache(config=model.config))
    exporter.register_cache_pytrees_for_model(model)
    leaves = torch.utils._pytree.tree_leaves(cache)
    assert len(leaves) == num_layers * (1 if "without_conv" in case else 2)

    step, token = copy.deepcopy(cache), tokens(1, 1)
    program = torch.export.export(model, (), {"input_ids": token, "past_key_values": step}, strict=False)
    inputs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    assert len(inputs) == 1 + len(leaves)
    exported = program.module()(input_ids=token, past_key_values=step)
    torch.testing.assert_close(exported.logits, next_logits(model, cache, token))
