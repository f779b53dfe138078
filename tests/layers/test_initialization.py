"""How parameters start: the papers' distributions, on any device, in any default dtype, and never over a checkpoint."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from deltazoo.layers import DeltaRuleAttention, make_layer
from deltazoo.layers.initialization import decay_rate_, log_uniform_step_, nearly_zero_rows_
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.spec import get_rule, list_rules
from deltazoo.swap import swap_attention, swapped_layers
from deltazoo.swap.transfer import _probe


def spread(values: torch.Tensor, low: float, high: float) -> None:
    """Values that are uniform on (low, high): range, mean and variance, each within five standard errors."""
    count, width = values.numel(), high - low
    values = values.double()
    assert values.min() >= low - 1e-3 * width and values.max() <= high + 1e-3 * width
    assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * count)
    assert abs(values.var() - width**2 / 12) < 5 * width**2 / math.sqrt(180 * count)


@pytest.mark.parametrize(("rule", "low"), [("gated_deltanet", 0.0), ("kda", 1.0), ("mamba2_style", 1.0)])
def test_decay_rates_are_uniform_as_in_the_paper(rule: str, low: float) -> None:
    A_log = torch.empty(1_000_000)
    decay_rate_(A_log, get_rule(rule).decay_rate_range)
    assert A_log.isfinite().all()
    spread(A_log.exp(), low, 16.0)


def test_steps_are_log_uniform_through_the_inverse_of_softplus() -> None:
    dt_bias = torch.empty(1_000_000)
    log_uniform_step_(dt_bias, (1e-3, 0.1))
    spread(F.softplus(dt_bias.double()).log(), math.log(1e-3), math.log(0.1))


def test_a_rate_drawn_at_the_edge_is_no_logarithm_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    A_log = torch.empty(2)
    for edge in (0.0, 1 - 2**-24):
        monkeypatch.setattr(torch, "rand_like", lambda x, edge=edge: torch.full_like(x, edge))
        decay_rate_(A_log, (0.0, 16.0))
        assert A_log.isfinite().all()


def test_weights_start_as_documented() -> None:
    layer = DeltaRuleAttention("kda", 512, 4, 64, initializer_range=0.006)
    for name in ("q_proj", "f_proj.0", "f_proj.1", "g_proj.0", "b_proj", "o_proj"):
        weight = layer.get_parameter(f"{name}.weight").detach().double()
        assert weight.std() == pytest.approx(0.006, rel=5 / math.sqrt(2 * weight.numel()))
    spread(layer.q_conv1d.weight.detach().flatten(), -0.5, 0.5)
    assert torch.equal(layer.o_norm.weight, torch.ones(64))
    assert torch.equal(layer.g_proj[1].bias, torch.zeros(256))


def test_short_convolutions_start_normal_where_asked() -> None:
    """In a layer of its own, in a model whose checkpoint lacks them, and in a swapped layer that starts at random."""
    config = DeltaRuleConfig(
        mixer="efla", vocab_size=16, hidden_size=256, num_hidden_layers=1, num_heads=4, conv_initializer_range=0.02
    )
    model = DeltaRuleForCausalLM(config)
    swapped = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16)
    )
    swap_attention(swapped, "efla", init="random", conv_initializer_range=0.02)
    layers = [
        DeltaRuleAttention("efla", 256, 4, conv_initializer_range=0.02),
        model.model.layers[0].attn,
        swapped_layers(swapped)[0].delta,
    ]
    for convolution in (layers[1].q_conv1d, layers[2].k_conv1d):
        torch.nn.init.constant_(convolution.weight, torch.nan)
    model._init_weights(layers[1].q_conv1d)
    swapped._init_weights(layers[2].k_conv1d)
    for layer in layers:
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            weight = layer.get_submodule(name).weight.detach().double()
            assert weight.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * weight.numel()))


@pytest.mark.parametrize(
    ("rule", "options"), [*((name, {}) for name in list_rules()), ("gated_deltanet", {"beta_bias": True})]
)
def test_every_parameter_has_an_initialiser(rule: str, options: dict) -> None:
    layer = make_layer(rule, 16, 2, 8, **options)
    assert layer.initializers().keys() == dict(layer.named_parameters()).keys()
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    layer.init_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_starting_afresh_spares_what_a_checkpoint_filled() -> None:
    layer = DeltaRuleAttention("gated_deltanet", 16, 2, 8)
    torch.nn.init.constant_(layer.A_log, 7.0)
    layer.A_log._is_hf_initialized = True  # type: ignore[attr-defined]
    before = layer.dt_bias.detach().clone()
    layer.init_parameters()
    assert torch.equal(layer.A_log, torch.full((2,), 7.0))
    assert not torch.equal(layer.dt_bias, before)


def test_a_bfloat16_default_dtype_does_not_reach_the_gates() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = DeltaRuleAttention("gated_deltanet", 16, 512, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert (layer.A_log.bfloat16() != layer.A_log).float().mean() > 0.9


def test_meta_device_costs_nothing_and_materialises(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        layer = DeltaRuleAttention("kda", 16, 2, 8)
    assert all(p.is_meta for p in layer.parameters())
    filled: list[Tensor] = []
    with monkeypatch.context() as patch:
        initializers = dict.fromkeys(dict(layer.named_parameters()), filled.append)
        patch.setattr(layer, "initializers", lambda _: initializers)
        layer.init_parameters()
        assert not filled
        layer.to_empty(device="cpu").init_parameters()
        assert len(filled) == len(initializers)
    layer.init_parameters()
    assert layer(torch.randn(1, 3, 16)).isfinite().all()


def test_noise_that_never_changes_is_drawn_on_the_cpu_under_any_default_device() -> None:
    expected, weight = torch.zeros(3, 5), torch.zeros(3, 5)
    nearly_zero_rows_(expected)
    with torch.device("meta"):
        nearly_zero_rows_(weight)
        probe = _probe(weight, None)
    assert torch.equal(weight, expected) and probe.device.type == "cpu"
