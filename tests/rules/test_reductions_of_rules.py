"""What a rule becomes when what it adds is switched off, on the inputs that its layer makes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerInput, LayerStates, RuleInputs, make_layer
from deltazoo.layers.norm import l2_normalize_both
from deltazoo.layers.rule import run_rule
from deltazoo.layers.sequences import WHOLE_ROWS
from deltazoo.layers.short_convolution import convolve
from deltazoo.layers.state import StateAccess
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.ops import linear_attention
from deltazoo.spec import RuleSpec, get_rule

HIDDEN, HEADS, K, VALUE_HEADS = 12, 2, 8, 4
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def make(rule: str | RuleSpec, **options: Any) -> DeltaRuleAttention:
    options = {"num_v_heads": VALUE_HEADS, "expand_v": 1, "initializer_range": 0.5, **options}
    return make_layer(rule, HIDDEN, HEADS, K, **options).double()


def tokens() -> Tensor:
    return torch.randn(2, 21, HIDDEN, dtype=torch.float64)


def heads(layer: DeltaRuleAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit queries and keys, and values, without convolutions."""
    q, k, v = layer._split_heads(layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    return *l2_normalize_both(q, k), v


def inputs(layer: DeltaRuleAttention, x: Tensor) -> RuleInputs:
    q, k, v = layer._split_heads(layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    return layer.rule_inputs(LayerInput(x, layer), *layer._normalize(q, k), v)


def assert_equal_runs(left: RuleInputs, right: RuleInputs, left_steps: int = 1, right_steps: int = 1) -> None:
    results = [run_rule(left, num_micro_steps=left_steps), run_rule(right, num_micro_steps=right_steps)]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_kaczmarz_is_gated_deltanet_on_unit_keys_with_values_divided_by_the_keys_length() -> None:
    layer, x = make("kaczmarz", use_short_conv=False), tokens()
    found = inputs(layer, x)
    length = (found.k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_equal_runs(
        found,
        found._replace(
            k=found.k / length,
            v=found.v / length.repeat_interleave(VALUE_HEADS // HEADS, dim=2),
            beta=layer.step_gate(LayerInput(x, layer)),
        ),
    )


@pytest.mark.parametrize("rule", ["efla", "longhorn"])
def test_without_its_decay_a_gated_rule_is_the_rule(rule: str) -> None:
    gated, plain, x = make(f"gated_{rule}", use_short_conv=False), make(rule, use_short_conv=False), tokens()
    plain.load_state_dict(gated.state_dict(), strict=False)
    found = inputs(gated, x)
    assert found.log_decay is not None and (found.log_decay < 0).all()
    assert_equal_runs(found._replace(log_decay=torch.zeros_like(found.log_decay)), inputs(plain, x))


def test_gated_deltaproduct_of_one_step_is_gated_deltanet_with_negative_eigenvalues() -> None:
    product, single, x = make("gated_deltaproduct", num_micro_steps=1), make("neg_gated_deltanet"), tokens()
    single.load_state_dict(product.state_dict())
    assert torch.equal(product(x), single(x))


def test_gated_deltaproduct_that_erases_and_writes_under_one_key_takes_one_full_step() -> None:
    found = inputs(make("neg_gated_deltanet", use_short_conv=False), tokens())
    assert found.beta is not None
    k = found.k / found.k.norm(dim=-1, keepdim=True)
    one = found._replace(k=k, beta=torch.ones_like(found.beta))
    two = one._replace(
        k=torch.cat((k, k), 2),
        v=torch.cat((torch.zeros_like(found.v), found.v), 2),
        beta=torch.cat((found.beta, torch.ones_like(found.beta)), 2),
    )
    assert_equal_runs(two, one, left_steps=2)


def test_erase_then_delta_with_a_closed_erase_gate_is_kda() -> None:
    eda, x = make("eda", beta_bias=True), tokens()
    torch.nn.init.constant_(eda.erase_b_proj.bias, -1e4)
    kda = make(replace(get_rule("kda"), output_gate="full"), beta_bias=True)
    kda.f_proj, kda.decay_gate = eda.f_proj, eda.decay_gate
    kda.load_state_dict(eda.state_dict(), strict=False)
    torch.testing.assert_close(eda(x), kda(x), **EXACT)


def test_erase_then_delta_writes_nothing_under_its_erase_address() -> None:
    found = inputs(make("eda", use_short_conv=False), tokens())
    assert found.k.shape[2] == 2 * HEADS and found.v.shape[2] == 2 * VALUE_HEADS
    assert not found.v[:, :, :VALUE_HEADS].any()
    torch.testing.assert_close(found.k.norm(dim=-1), torch.ones_like(found.k[..., 0]), rtol=0, atol=1e-3)


def test_bounded_decays_of_erase_then_delta_attention_start_as_those_of_kda() -> None:
    """The saturating gate changes a decay in second order alone, and never passes its bound."""
    saturating = get_rule("eda")
    layer = make("eda")
    softplus = DeltaRuleAttention(replace(get_rule("kda"), name="unregistered"), HIDDEN, HEADS, K).decay_gate
    a = torch.randn(1, 3, VALUE_HEADS, K, dtype=torch.float64)
    free, bounded = (gate(a, layer.A_log, layer.dt_bias) for gate in (softplus, layer.decay_gate))
    assert saturating.decay_gate == "saturating"
    assert ((bounded - free).abs() <= free.square() / 10 + 1e-12).all()
    assert (bounded >= -5).all()


def test_fg2_gdn_with_equal_channels_is_kda() -> None:
    fg2, kda, x = make("fg2_gdn", beta_bias=True), make("kda", beta_bias=True), tokens()
    step = 0.3
    for layer in (fg2, kda):
        torch.nn.init.zeros_(layer.b_proj.weight)
        torch.nn.init.constant_(layer.b_proj.bias, math.log(step / (1 - step)))
    torch.nn.init.zeros_(fg2.w_proj.weight)  # w = 1/2
    kda.load_state_dict({name: p for name, p in fg2.state_dict().items() if "b_proj" not in name}, strict=False)
    found, expected = (layer.rule_inputs(LayerInput(x, layer), *heads(kda, x)) for layer in (fg2, kda))
    assert_equal_runs(found, expected._replace(v=expected.v * math.sqrt(0.5 / step)))


@pytest.mark.parametrize("neg_eigval", ["both", "erase"])
def test_doubled_gates_of_fg2_gdn_write_as_those_of_kda_do(neg_eigval: str) -> None:
    """With all gates at 1/2 the doubled erase reaches the whole key, and the write is one value or half of one."""
    layer, x = make("fg2_gdn", allow_neg_eigval=True, neg_eigval=neg_eigval), tokens()
    for projection in (layer.b_proj, layer.w_proj):
        torch.nn.init.zeros_(projection.weight)
    q, k, v = heads(layer, x)
    found = layer.rule_inputs(LayerInput(x, layer), q, k, v)
    torch.testing.assert_close(found.k, k, **EXACT)
    torch.testing.assert_close(found.v, v if neg_eigval == "both" else v / 2, **EXACT)


def test_gates_of_fg2_gdn_that_are_closed_have_finite_gradients() -> None:
    layer, x = make("fg2_gdn"), tokens()
    torch.nn.init.constant_(layer.b_proj.weight, -1e3)
    layer(x.abs()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_gated_linear_attention_with_equal_channels_has_one_decay_per_head() -> None:
    layer, x = make("gla", use_short_conv=False), tokens()
    torch.nn.init.constant_(layer.gk_proj[1].bias, 0.7)
    torch.nn.init.zeros_(layer.gk_proj[1].weight)
    found = inputs(layer, x)
    assert found.beta is None and found.log_decay is not None
    assert_equal_runs(found, found._replace(log_decay=found.log_decay[..., 0]))
    torch.testing.assert_close(found.log_decay[0, 0, 0, 0].item(), -math.log(1 + math.exp(-0.7)) / 16)


def test_gated_linear_attention_without_convolutions_has_no_activation() -> None:
    layer, x = make("gla", use_short_conv=False), tokens()
    q, k, v, _ = convolve(None, x, x, x, StateAccess(None, None), WHOLE_ROWS, layer.activation)
    assert all(torch.equal(y, x) for y in (q, k, v))


def test_lightning_attention_decays_by_head_and_layer_alone() -> None:
    made = [make("lightning_attention", num_v_heads=None, num_layers=3, layer_idx=layer) for layer in range(3)]
    decays = [layer.log_decay(LayerInput(tokens(), layer)) for layer in made]
    expected = -torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    for found, factor in zip(decays, (1, 0.5, 0), strict=True):
        assert found is not None
        torch.testing.assert_close(found, (expected * (factor + 1e-5)).expand(2, 21, -1), **EXACT)


def test_heads_of_lightning_attention_beyond_a_power_of_two_have_the_rates_of_alibi() -> None:
    """Four heads at 2^-2 to 2^-8, and the first and third of eight; the earlier revision spreads six evenly."""
    layer = make_layer("lightning_attention", HIDDEN, 6, K)
    rates = 0.5 ** torch.tensor([2, 4, 6, 8, 1, 3], dtype=torch.float64)
    torch.testing.assert_close(-layer.log_decay(LayerInput(tokens(), layer))[0, 0], rates * (1 + 1e-5), **EXACT)
    earlier = make_layer(get_rule("lightning_attention", revision=1), HIDDEN, 6, K)
    rates = 0.5 ** (torch.arange(1, 7, dtype=torch.float64) * 8 / 6)
    torch.testing.assert_close(-earlier.log_decay(LayerInput(tokens(), earlier))[0, 0], rates * (1 + 1e-5), **EXACT)


def test_lightning_attention_does_not_scale_queries() -> None:
    """In whole rows, and a token at a time."""
    layer, x, states = make("lightning_attention", layer_idx=0), tokens(), LayerStates()
    q, k, v = (torch.nn.functional.silu(y) for y in (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)))
    found = layer.apply_rule(inputs(layer, x), StateAccess(None, None), WHOLE_ROWS).output
    with patch.object(layer, "_norm_and_gate", lambda output, _: output), torch.no_grad():
        steps = torch.cat([layer(x[:, t : t + 1], past_key_values=states) for t in range(x.shape[1])], 1)
        torch.testing.assert_close(steps, layer(x), **EXACT)
    scaled = inputs(layer, x)
    expected = linear_attention(scaled.q, scaled.k, scaled.v, scaled.log_decay, scale=1.0).output
    torch.testing.assert_close(found, expected, **EXACT)


def test_a_model_tells_lightning_attention_how_deep_it_is() -> None:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 4}
    model = DeltaRuleForCausalLM(DeltaRuleConfig(mixer="lightning_attention", **sizes))
    assert [(layer.attn.layer_idx, layer.attn.num_layers) for layer in model.model.layers] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("rule", ["gla", "lightning_attention"])
def test_a_decay_of_its_own_takes_no_bound(rule: str) -> None:
    with pytest.raises(ValueError, match="has a decay of its own, so decay_lower_bound=-5.0 cannot act"):
        make(rule, decay_lower_bound=-5.0)
