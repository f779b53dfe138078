"""What a swap copies, how the rest starts, and what unswapping restores."""

import copy

import pytest
import torch
from tiny_families import OWN, swapped, tiny_original, tokens

import deltazoo
from deltazoo.layers import LayerInput
from deltazoo.ops.fused import norms, rotate
from deltazoo.swap import FAMILIES, swapped_layers
from deltazoo.swap.families import decoder_layers_of
from deltazoo.swap.layer import DropInDeltaAttention


def captured_attention(model, index, ids):
    """Input, rotary embedding and output of one attention layer in a forward pass."""
    family = FAMILIES[model.config.model_type]
    seen = {}

    def keep(module, args, kwargs, output):
        seen.update(kwargs, x=args[0] if args else kwargs["hidden_states"], output=output[0])

    slot = decoder_layers_of(model, family)[index].get_submodule(family.attention)
    handle = slot.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return seen["x"], seen.get("position_embeddings"), seen["output"], slot.scaling


def softmax_attention(delta, x, rotary, scaling):
    """Causal softmax attention with the projections and norms of a delta-rule layer."""
    q, k, v = delta._split_heads(delta.q_proj(x), delta.k_proj(x), delta.v_proj(x))
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * scaling
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return delta.o_proj(torch.einsum("bhts,bshv->bthv", weights, v).flatten(2))


@pytest.mark.parametrize(("family", "grouped"), [*((f, False) for f in OWN), ("qwen2", True), ("olmo2", True)])
def test_copied_weights_give_the_original_attention(family, grouped):
    """Softmax over the copied projections is what the original attention computes: nothing is mixed up."""
    without_window = {"sliding_window": 64} if "sliding_window" in OWN[family] else {}
    uncapped = {"attn_logit_softcapping": 1e6} if family == "gemma2" else {}
    model, ids = tiny_original(family, **without_window, **uncapped).double(), tokens(2, 7)
    x, rotary, expected, scaling = captured_attention(model, 2, ids)
    deltazoo.swap_attention(model, "delta_net", [2], grouped=grouped)
    layer = swapped_layers(model)[2]
    with torch.no_grad():
        actual = softmax_attention(layer.delta, x, rotary if layer.rope else None, scaling)
    # Original models compute norms of queries and keys, and score caps, in float32 at every dtype.
    tolerance = 1e-9 if layer.delta.qk_norm is None and not uncapped else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", OWN)
def test_the_rest_stays_bit_for_bit_and_unswap_restores(family):
    original, ids = tiny_original(family), tokens(2, 7)
    original.requires_grad_(False)
    slot = FAMILIES[family].attention
    first, *_ = decoder_layers_of(original, FAMILIES[family])[0].get_submodule(slot).parameters()
    first.requires_grad_(True)  # of a swapped layer: unswapping returns it trainable, and the others frozen
    original.train()
    model = copy.deepcopy(original)
    deltazoo.swap_attention(model, "kda", "1:1", keep_teacher=True)
    before, after = original.state_dict(), model.state_dict()
    swapped = {f".{index}.{slot}." for index in swapped_layers(model)}
    untouched = [name for name in before if not any(part in name for part in swapped)]
    assert len(untouched) < len(before)
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    assert not any("teacher" in name for name in after)

    deltazoo.unswap_attention(model)
    assert type(model) is type(original) and type(model.base_model) is type(original.base_model)
    assert type(model.config) is type(original.config) and model.config.to_dict() == original.config.to_dict()
    assert model._tp_plan == original._tp_plan
    restored = model.state_dict()
    assert list(restored) == list(before) and all(torch.equal(before[name], restored[name]) for name in before)
    flags = [
        [(p.requires_grad, m.training) for m in x.modules() for p in m.parameters(False)] for x in (model, original)
    ]
    assert flags[0] == flags[1]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, original.eval()(ids).logits)


def test_a_teacher_is_frozen_and_moves_along():
    model = tiny_original("llama").train()
    deltazoo.swap_attention(model, "gated_deltanet", [0], keep_teacher=True)
    layer = swapped_layers(model)[0]
    assert not any(p.requires_grad for p in layer.teacher.parameters())
    assert not any(module.training for module in layer.teacher.modules()) and layer.delta.training
    assert all(p.requires_grad for p in layer.delta.parameters())
    model.to(torch.bfloat16)
    assert {p.dtype for p in layer.teacher.parameters()} == {torch.bfloat16}
    assert copy.deepcopy(model).model.layers[0].self_attn.teacher is not layer.teacher


def test_unswap_needs_a_teacher():
    model = tiny_original("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a swapped model"):
        deltazoo.unswap_attention(model)
    deltazoo.swap_attention(model, "delta_net", [1, 2])
    with pytest.raises(ValueError, match=r"layers \[1, 2\] was not kept"):
        deltazoo.unswap_attention(model)
    assert list(swapped_layers(model)) == [1, 2]


@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_gates_start_as_documented(rule):
    model = swapped("qwen3", [0], rule, exact=True)
    delta = swapped_layers(model)[0].delta
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = delta.q_proj(x), delta.k_proj(x), delta.v_proj(x)
        for name, projected in zip("qkv", (q, k, v), strict=True):
            convolved, _ = getattr(delta, f"{name}_conv1d")(projected)
            assert torch.equal(convolved, projected)
        q, k, v = delta._split_heads(q, k, v)
        q, k = delta._normalize(q, k)
        inputs = delta.rule_inputs(LayerInput(x, delta), q, k, v)
        if delta.spec.corrects and rule != "momentum":  # whose keys are at right angles
            erase_key = inputs.k if inputs.erase_key is None else inputs.erase_key
            gain = inputs.beta * (inputs.k * erase_key).sum(-1)
            last_step = gain[..., -delta.num_v_heads :].mean().item()
            assert last_step == pytest.approx(1.0 if delta.allow_neg_eigval else 0.5, abs=0.05)
        if delta.spec.decay != "none" and rule != "lightning_attention":  # which has a fixed decay
            time = -1 / inputs.log_decay[..., :16]  # not of the momentum
            assert time.min().item() == pytest.approx(8, rel=1e-3)
            assert time.max().item() == pytest.approx(4096, rel=1e-3)
        if delta.spec.output_gate != "none":
            normed = torch.randn(2, 50, 4, 16, dtype=torch.float64)
            bare = torch.nn.functional.rms_norm(normed, (16,), eps=delta.o_norm.eps)
            gated = delta._norm_and_gate(normed, LayerInput(x, delta))
            ratio = (gated / bare).flatten()
            # Constant except for rows of length 1e-4, as is the decay: see test_dora.
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=0)


def test_random_start_takes_nothing_and_other_sizes():
    model = tiny_original("qwen2")
    report = deltazoo.swap_attention(
        model, "gated_deltanet", [3], init="random", num_heads=2, num_v_heads=4, head_dim=8, expand_v=2
    )
    assert report.layers[0].copied == ()
    assert {"q_proj.weight", "o_proj.weight"} <= set(report.layers[0].dropped)
    delta = swapped_layers(model)[3].delta
    assert (delta.num_v_heads, delta.head_v_dim) == (4, 16)
    assert delta.q_proj.weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert model(tokens(1, 5)).logits.isfinite().all()


def test_choices_are_recorded_and_act():
    ids = tokens(2, 9)
    logits = {}
    choices = {
        "default": {},
        "no rope": {"rope": False},
        "no norms": {"qk_norm": False},
        "silu": {"activation": "silu"},
        "no conv": {"use_short_conv": False},
        "negative": {"allow_neg_eigval": True},
    }
    for name, choice in choices.items():
        model = tiny_original("qwen3")
        deltazoo.swap_attention(model, "gated_deltanet", **choice)
        with torch.no_grad():
            logits[name] = model(ids).logits
    assert torch.equal(logits.pop("no conv"), logits["default"])  # an identity convolution changes nothing
    different = list(logits.values())
    assert all(not torch.allclose(a, b) for i, a in enumerate(different) for b in different[:i])


def test_grouped_heads_stay_the_original_matrices():
    original = tiny_original("llama")
    model = copy.deepcopy(original)
    report = deltazoo.swap_attention(model, "delta_net", [0], grouped=True)
    expanded = deltazoo.swap_attention(copy.deepcopy(original), "delta_net", [0])
    delta, attention = swapped_layers(model)[0].delta, original.model.layers[0].self_attn
    assert torch.equal(delta.k_proj.weight, attention.k_proj.weight)
    assert torch.equal(delta.v_proj.weight, attention.v_proj.weight)
    assert report.parameters_after < expanded.parameters_after
    recurrent = 4 * 8 * 8 * 4
    assert report.layers[0].state_bytes == recurrent + (32 + 16 + 16) * 3 * 4
    assert expanded.layers[0].state_bytes == recurrent + 3 * 32 * 3 * 4


def test_outputs_start_about_as_long_as_the_originals():
    """Before any training, on random tokens: the reasoning about lengths holds within a factor of three."""
    model, ids = tiny_original("llama"), tokens(4, 40)
    x, rotary, expected, _ = captured_attention(model, 1, ids)
    for rule in ("delta_net", "gated_deltanet", "kda", "efla"):
        swapped = copy.deepcopy(model)
        deltazoo.swap_attention(swapped, rule, [1])
        with torch.no_grad():
            actual, _ = swapped_layers(swapped)[1](x, position_embeddings=rotary)
        assert 1 / 3 < actual.std().item() / expected.std().item() < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=2"),
        ({"qk_norm": "heads"}, "qk_norm must be 'head', 'width' or None, got 'heads'"),
    ],
)
def test_wrong_sizes_and_norms(options, message):
    with pytest.raises(ValueError, match=message):
        DropInDeltaAttention("delta_net", 32, 2, 16, **options)


@pytest.mark.parametrize("fused", [None, True, False])
def test_queries_and_keys_have_unit_length_after_the_original_norms(fused, monkeypatch):
    # What the kernels compute, by torch: the kernels themselves refuse a CPU.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(norms, "_rms_operator", norms._rms_torch)
    monkeypatch.setattr(norms, "_l2_operator", norms._l2_torch)
    layer = DropInDeltaAttention("delta_net", 32, 2, 16, qk_norm="head", fused_kernels=fused)
    for x in layer._normalize(torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(1, 5, 2), rtol=0, atol=1e-5)


def test_erase_then_delta_attention_starts_near_kda():
    model = swapped("qwen3", [0], "eda", exact=True)
    delta = swapped_layers(model)[0].delta
    gate = torch.sigmoid(delta.erase_b_proj(torch.randn(2, 5, 32, dtype=torch.float64)))
    assert gate.min() > 0 and gate.max() < 0.02


@pytest.mark.parametrize(("rule", "name"), [("gated_deltanet2", "w_proj"), ("q_delta", "lamb_proj")])
def test_what_a_rule_adds_starts_the_same_for_all_tokens(rule, name):
    model = swapped("llama", [0], rule)
    made = getattr(swapped_layers(model)[0].delta, name)(torch.randn(1, 50, 32))
    assert made.abs().max() < 1e-2


def test_a_preconditioned_rule_leaves_keys_nearly_as_they_are_once_its_moment_is_steady():
    model = swapped("llama", [0], "pkda", exact=True)
    delta, passed = swapped_layers(model)[0].delta, []
    run = delta.apply_rule
    delta.apply_rule = lambda inputs, *rest: (passed.append(inputs), run(inputs, *rest))[1]
    delta.A_log_atk.data.fill_(0)
    delta.dt_bias_atk.data.fill_(-2)
    for name, start in delta.neutral_initializers().items():
        start(delta.get_parameter(name))
    with torch.no_grad():
        delta(torch.randn(1, 400, 32, dtype=torch.float64))
    ratio = (passed[0].k / passed[0].erase_key)[:, 200:].abs()
    assert 0.9 < ratio.log().mean().exp() < 1.1
