"""Rules with an erase key of their own: what they become without it, hard inputs, rounding, growth, a further state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerInput, LayerStates, RuleInputs, make_layer
from deltazoo.layers.rule import run_rule
from deltazoo.layers.state import meta_state
from deltazoo.ops import fused
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import moment
from deltazoo.spec import RuleSpec, get_rule, list_rules

HIDDEN, HEADS, K = 12, 2, 8
RULES = [name for name in list_rules() if get_rule(name).erase_key == "separate"]


def make(rule: str | RuleSpec, **options: Any) -> DeltaRuleAttention:
    options = {"expand_v": 1, "initializer_range": 0.5, "layer_idx": 0, **options}
    return make_layer(rule, HIDDEN, HEADS, K, **options).double()


def tokens(number: int = 21) -> Tensor:
    """The first channel is one, so that a column of a linear map is a bias."""
    x = torch.randn(2, number, HIDDEN, dtype=torch.float64)
    x[..., 0] = 1
    return x


def pair(rule: str, parent: str | RuleSpec, **options: object) -> tuple[DeltaRuleAttention, DeltaRuleAttention]:
    """Layers of a rule and of the one it extends, with the same weights where both have them in the same shape."""
    layer, simpler = make(rule, **options), make(parent, **options)
    mine, shared = layer.state_dict(), simpler.state_dict()
    same = {name: x for name, x in shared.items() if name in mine and mine[name].shape == x.shape}
    layer.load_state_dict(same, strict=False)
    return layer, simpler


def assert_equal_layers(layer: DeltaRuleAttention, simpler: DeltaRuleAttention, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(layer(x), simpler(x), rtol=1e-10, atol=1e-12)


def test_gated_deltanet2_with_all_gates_equal_to_one_per_head_is_kda() -> None:
    layer, kda = pair("gated_deltanet2", "kda")
    for name in ("b_proj", "w_proj"):
        layer.get_parameter(f"{name}.weight").data = kda.b_proj.weight.data.repeat_interleave(K, 0)
    assert_equal_layers(layer, kda, tokens())


def test_qed_without_the_querys_direction_is_gated_deltanet2() -> None:
    layer, simpler = pair("qed", "gated_deltanet2")
    torch.nn.init.constant_(layer.get_parameter("theta"), -math.inf)
    assert_equal_layers(layer, simpler, tokens())


def test_q_delta_without_the_query_is_gated_deltanet() -> None:
    layer, simpler = pair("q_delta", "gated_deltanet")
    layer.get_parameter("lamb_proj.weight").data[:, 0] = -1e4
    assert_equal_layers(layer, simpler, tokens())


def test_comba_that_erases_what_the_decay_leaves_is_gated_deltanet() -> None:
    layer, simpler = pair("comba", "gated_deltanet", use_short_conv=False)
    for either in (layer, simpler):
        torch.nn.init.zeros_(either.a_proj.weight)  # the same decay for all tokens, which the feedback can equal
    log_decay = layer.log_decay(LayerInput(tokens(1), layer))
    assert log_decay is not None
    layer.get_parameter("decay").data = torch.logit(log_decay[0, 0].exp()).detach()
    torch.nn.init.zeros_(layer.get_parameter("D"))
    results = [
        run_rule(inputs(either, x), erase_reads=either.spec.erase_reads)
        for x in [tokens()]
        for either in (layer, simpler)
    ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rule", "parent"), [("pgdn", "gated_deltanet"), ("pkda", "kda")])
def test_without_a_squash_the_preconditioned_rules_are_their_parents(
    rule: str, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moment, "SQUASH", 1.0)
    like_parent = replace(get_rule(parent), output_gate=get_rule(rule).output_gate)
    assert_equal_layers(*pair(rule, like_parent), tokens())


def inputs(layer: DeltaRuleAttention, x: Tensor) -> RuleInputs:
    q, k, v = layer._split_heads(layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    return layer.rule_inputs(LayerInput(x, layer), *layer._normalize(q, k), v)


@pytest.mark.parametrize("gates", [-1e4, 1e4], ids=["gates shut", "gates open"])
@pytest.mark.parametrize("query", [-1.0, 1.0, 0.0], ids=["query opposite", "query equal", "query orthogonal"])
@pytest.mark.parametrize("rule", RULES)
def test_the_chunk_form_on_hard_inputs(rule: str, query: float, gates: float) -> None:
    """Outputs and gradients against the loop over tokens, which half of the time are one token repeated.

    Gates of step and erase key are all the way open or shut, so that erase keys are zero, or point anywhere.
    """
    options = {"use_short_conv": False, "activation": "identity"}
    layers = [make(rule, backend=backend, **options) for backend in ("chunkwise", "reference")]
    with torch.no_grad():
        layer = layers[0]
        turned = layer.k_proj.weight.view(-1, 2, HIDDEN).flip(1) * torch.tensor([1.0, -1.0]).view(2, 1)
        layer.q_proj.weight.copy_(query * layer.k_proj.weight if query else turned.reshape(-1, HIDDEN))
        for name in ("b_proj", "w_proj", "lamb_proj", "b_atk_proj"):
            if hasattr(layer, name):
                layer.get_parameter(f"{name}.weight")[::2, 0] = gates
        layers[1].load_state_dict(layer.state_dict())
    x = tokens(70)
    x[:, 35:] = x[:, 35:36]
    results = []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])
        results.append([y, *gradients])
    largest = max(x.abs().max() for x in results[1])
    for mine, theirs in zip(*results, strict=True):
        assert theirs.isfinite().all()
        # A gradient that cancels has the rounding error of its terms.
        assert (mine - theirs).abs().max() <= 1e-9 * theirs.abs().max() + 1e-12 * largest


def numbers(*shape: int) -> Tensor:
    return torch.randn(1, 64, HEADS, *shape)


MADE_KEYS: dict[str, tuple[Callable, list[Tensor]]] = {
    "gated_deltanet2": (fused.sigmoid_gate, [numbers(K), numbers(K)]),
    "qed": (
        partial(fused.qed_key, theta=torch.zeros(HEADS), largest=1.0),
        [numbers(K), numbers(K), numbers(K)],
    ),
    "q_delta": (fused.q_delta_key, [numbers(), numbers(K), numbers(K)]),
    "comba": (
        partial(fused.comba_keys, decay=torch.ones(HEADS), D=torch.ones(HEADS)),
        [numbers(K), numbers(K)],
    ),
    "pgdn": (
        lambda k: fused.scaled_key(at_least_float32(k).square(), TWO, k),
        [numbers(K)],
    ),
}
"""Rule -> the function that makes its keys, and arguments for it."""
TWO = torch.full((HEADS,), 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", MADE_KEYS)
def test_keys_in_16_bits_are_rounded_once(rule: str, dtype: torch.dtype) -> None:
    function, arguments = MADE_KEYS[rule]
    rounded = [x.to(dtype) for x in arguments]
    exact, found = function(*(x.double() for x in rounded)), function(*rounded)
    for wide, narrow in zip(*(x if isinstance(x, tuple) else (x,) for x in (exact, found)), strict=True):
        assert narrow.dtype == dtype
        half_a_digit = torch.finfo(dtype).eps / 2 * torch.exp2(wide.abs().log2().floor()).clamp_min(1e-4)
        # A little more: float32 has an error of its own, and cancellation in a sum makes it show.
        assert ((narrow.double() - wide).abs() <= 1.01 * half_a_digit + 1e-6).all()


def test_two_tokens_of_a_gated_deltanet2_layer_grow_together() -> None:
    """Without decay the pair has spectral radius 1.230, though each token's eigenvalues are in [0, 1]."""
    layer = make_layer("gated_deltanet2", 2, 1, 2, use_short_conv=False, activation="identity").double()
    long, short = 0.75**0.5, 0.5
    with torch.no_grad():
        layer.k_proj.weight.copy_(1e4 * torch.tensor([[short, long], [long, short]]))  # one column per token
        layer.b_proj.weight.copy_(torch.tensor([[1e4, -1e4], [-1e4, 1e4]]))
        layer.v_proj.weight.zero_()
        pairs = 32
        made = inputs(layer, torch.eye(2, dtype=torch.float64).repeat(pairs, 1)[None])
    assert made.log_decay is not None
    state = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    state = run_rule(made._replace(log_decay=torch.zeros_like(made.log_decay)), state).final_state
    assert torch.linalg.matrix_norm(state, 2).item() ** (1 / pairs) == pytest.approx(1.230, rel=0.02)


@pytest.mark.parametrize("rule", ["q_delta", "comba", "comba_unit_erase"])
def test_a_doubled_step_is_refused_where_the_state_could_grow(rule: str) -> None:
    with pytest.raises(ValueError, match=f"rule '{rule}' takes no allow_neg_eigval=True"):
        make(rule, allow_neg_eigval=True)


@pytest.mark.parametrize("rule", ["gated_deltanet2", "qed"])
def test_a_doubled_erase_gate_leaves_the_write_alone(rule: str) -> None:
    plain, doubled, x = make(rule), make(rule, allow_neg_eigval=True), tokens()
    doubled.load_state_dict(plain.state_dict())
    once, twice = inputs(plain, x), inputs(doubled, x)
    assert once.erase_key is not None and twice.erase_key is not None
    torch.testing.assert_close(twice.erase_key, 2 * once.erase_key)
    assert torch.equal(once.v, twice.v)
    with pytest.raises(ValueError, match="neg_eigval='erase' cannot act"):
        make(rule, allow_neg_eigval=True, neg_eigval="erase")


@pytest.mark.parametrize("rule", ["pgdn", "pkda"])
def test_the_doubled_step_of_a_preconditioned_rule_is_bounded(rule: str) -> None:
    """Where the moment is small the write key is 1.5 times the key, so a step of 2 would have an eigenvalue of -2."""
    layer, x = make(rule, allow_neg_eigval=True), tokens()
    with torch.no_grad():
        layer.b_proj.weight[:, 0] = 1e4
        layer.get_parameter("log_atk_scale").fill_(30.0)
    with patch.object(layer, "apply_rule", wraps=layer.apply_rule) as applied:
        layer(x)
    seen = [call.args[0] for call in applied.call_args_list]
    ((_, k, _, beta, _, erase_key),) = seen
    gain = (k * erase_key).sum(-1)
    assert gain.max() > 1.4
    torch.testing.assert_close(beta * gain, torch.full_like(gain, 2 * (1 - 2**-13)))


@pytest.mark.parametrize("rule", ["kda", "gated_deltanet2", "pgdn", "pkda", "falcon", "isotropic_kdn", "momentum"])
def test_the_size_of_a_state_is_what_a_cache_holds(rule: str) -> None:
    layer, states = make(rule, num_v_heads=4).bfloat16(), LayerStates()
    layer(tokens(5).bfloat16(), past_key_values=states)
    for found, held in zip(meta_state(layer.to("meta")), states.states[0], strict=True):
        assert (found is None) == (held is None)
        assert found is None or (found[0].shape, found.dtype) == (held[0].shape, held.dtype)
