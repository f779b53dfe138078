"""Step sizes of the rules, and the guard that keeps rounded keys from blowing up the state."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import record_precision
from outside_rule import forget_rules
from torch import Tensor

from deltazoo.layers import (
    EFLA,
    DeltaNet,
    DeltaRuleAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LayerInput,
    LayerStates,
    Longhorn,
    NegativeEigenvalueDeltaNet,
    PaddedSequences,
    RuleInputs,
    bounded_step,
    l2_normalize,
    make_layer,
)
from deltazoo.layers import rule as rule_functions
from deltazoo.layers.rule import EffectiveStep
from deltazoo.ops import delta_rule
from deltazoo.rules.comba_layer import Comba
from deltazoo.spec import get_rule, list_rules, register_rule
from deltazoo.swap.layer import drop_in_class

REPEATS = 16_384


def longest_rounded_key() -> Tensor:
    """Of 4,096 random unit keys rounded to bfloat16, the longest, in float32."""
    keys = l2_normalize(torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    return keys[keys.square().sum(-1).argmax()]


def final_state_norm(beta: Tensor) -> float:
    """Norm of the state after one key was repeated with these step sizes `[1, T, 1]`."""
    T = beta.shape[1]
    k = longest_rounded_key().expand(1, T, 1, 128)
    v = torch.randn(1, T, 1, 4)
    return delta_rule(k, k, v, beta, backend="chunkwise").final_state.norm().item()


def test_a_rounded_key_is_too_long_for_a_step_of_two() -> None:
    assert longest_rounded_key().square().sum() > 1.0015


def test_guard_bounds_the_state_over_16k_repeats() -> None:
    beta = torch.full((1, REPEATS, 1), 2.0)
    guarded = bounded_step(beta, longest_rounded_key().expand(1, REPEATS, 1, 128))
    assert 0 < (beta - guarded).max() < 0.004
    # Along the key the state is a walk: each step reflects it and adds twice a random value of 4 channels, so its norm
    # is about 2 * sqrt(4 * T).
    assert final_state_norm(guarded) < 5 * 2 * (4 * REPEATS) ** 0.5


def test_without_the_guard_the_state_explodes() -> None:
    norm = final_state_norm(torch.full((1, REPEATS, 1), 2.0))
    assert not norm < 1e10


def test_guard_leaves_short_keys_and_small_steps_alone() -> None:
    k = torch.tensor([[0.0, 0.0], [0.5, 0.5], [1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]).view(1, 5, 1, 2)
    for step in (0.3, 1.0, 2.0):
        beta = torch.full((1, 5, 2), step)
        bound = torch.tensor([float("inf"), 4.0, 2.0, 1.0, 0.5])
        assert torch.equal(bounded_step(beta, k)[0, :, 0], torch.minimum(beta[0, :, 0], bound))


def test_guard_counts_value_heads_per_key_head() -> None:
    k = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    assert bounded_step(torch.full((1, 1, 4), 2.0), k).flatten().tolist() == [2, 2, 0.5, 0.5]


@pytest.mark.parametrize("by_rounding", [False, True])
def test_guard_passes_gradients_to_the_gate_where_it_does_not_bind_and_else_to_the_key(by_rounding: bool) -> None:
    k = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).requires_grad_()
    beta = torch.tensor([1.5, 1.5]).view(1, 2, 1).requires_grad_()
    bounded_step(beta, k, by_rounding=by_rounding).sum().backward()
    assert beta.grad is not None and beta.grad.flatten().tolist() == [1, 0]
    assert k.grad is None if by_rounding else k.grad.flatten().tolist() == [0, -0.5]  # of 2 / k^2


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-20, 1e-10, 1.0])
def test_gradients_of_the_guard_are_finite_for_short_keys(length: float) -> None:
    k = torch.full((1, 1, 1, 4), length).requires_grad_()
    bounded_step(torch.ones(1, 1, 1), k).sum().backward()
    assert k.grad is not None and k.grad.isfinite().all()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        *((name, {"allow_neg_eigval": True}) for name in ("pgdn", "pkda", "gated_deltanet", "gated_deltanet2")),
        *((name, {"normalize_k": False}) for name in ("delta_net", "comba", "q_delta", "pgdn")),
    ],
    ids=str,
)
def test_gradients_through_the_guard_are_those_of_the_function(rule: str, changes: dict) -> None:
    """With gates and keys for which it binds at many tokens, where a rule lets it: along a random direction."""
    spec = replace(get_rule(rule), **changes)
    layer = make_layer(spec, 16, 2, 8, expand_v=1, initializer_range=0.5, beta_bias=True).double()
    torch.nn.init.constant_(layer.b_proj.bias, 2.0)
    x, weight = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    tensors = [x.requires_grad_(), *layer.parameters()]
    gradients = torch.autograd.grad((layer(x) * weight).sum(), tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        direction, values = torch.randn_like(tensor), []
        with torch.no_grad():
            for sign in (1, -1):
                tensor.add_(sign * 1e-6 * direction)
                values.append((layer(x) * weight).sum())
                tensor.sub_(sign * 1e-6 * direction)
        torch.testing.assert_close((gradient * direction).sum(), (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", ["scalar", "channel"])
@pytest.mark.parametrize("log_decay", [-5e-8, -1e-7, -5e-6])
def test_a_key_repeated_at_the_bound_of_a_decaying_state_does_not_let_it_grow(log_decay: float, decay: str) -> None:
    """The chunk form rounds every chunk alike; just below a gain of 2 the state shrinks faster than that stretches."""
    T, K = 4096, 64
    spec = replace(get_rule("neg_gated_deltanet"), decay=decay)
    k = torch.nn.functional.normalize(torch.randn(16, K), dim=-1).bfloat16().expand(1, T, 16, K)
    beta = EffectiveStep(spec, allow_neg_eigval=True)(torch.ones(1, T, 16), k)
    decays = torch.full((1, T, 16) if decay == "scalar" else (1, T, 16, K), log_decay)
    start = k[:, 0, :, :, None].float()
    end = delta_rule(k, k, k[..., :1] * 0, beta, decays, initial_state=start, backend="chunkwise").final_state
    assert (end.norm(dim=(2, 3)) <= start.norm(dim=(2, 3))).all()


@pytest.mark.parametrize("name", ["delta_net", "efla", "longhorn"])
@pytest.mark.parametrize("doubled", [False, True])
def test_no_transition_expands(name: str, doubled: bool) -> None:
    spec = get_rule(name)
    k = torch.randn(1, 512, 1, 16).mul(torch.logspace(-3, 3, 512).view(1, 512, 1, 1)).bfloat16()
    if spec.normalize_k:
        k = l2_normalize(k)
    b = torch.rand(1, 512, 1)
    b[:, ::2] = 1
    beta = EffectiveStep(spec, allow_neg_eigval=doubled)(b, k)
    eigenvalue = 1 - beta.double() * k.double().square().sum(-1)
    rounding = 4 * torch.finfo(torch.float32).eps
    assert eigenvalue.max() <= 1
    slack = 0.004 if spec.normalize_k and not doubled else rounding  # unit keys, rounded, may overshoot zero slightly
    assert eigenvalue.min() >= (-1 if doubled else 0) - slack
    assert beta.dtype == torch.float32


def test_eulers_step_on_raw_keys_is_guarded_too() -> None:
    raw = replace(get_rule("delta_net"), name="raw_delta_net", normalize_k=False)
    k = torch.full((1, 1, 1, 4), 3.0)
    assert EffectiveStep(raw, allow_neg_eigval=False)(torch.ones(1, 1, 1), k).item() == pytest.approx(2 / 36)


def test_padding_tokens_neither_write_nor_erase_nor_decay() -> None:
    real = torch.tensor([[True, True, False], [True, False, False]])
    sequences = PaddedSequences.from_mask(real)
    q, k, v = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4), torch.randn(2, 3, 2, 4)
    for gate_shape in ((2, 3, 2), (2, 3, 2, 4)):
        inputs = RuleInputs(q, k, v, torch.rand(2, 3, 2), -torch.rand(gate_shape)).mask_padding(sequences)
        for x in (inputs.v, inputs.beta, inputs.log_decay):
            assert x is not None
            assert (x[~real] == 0).all() and (x[real] != 0).all()
    assert RuleInputs(q, k, v, None, None).mask_padding(sequences)[3:] == (None, None, None)


@pytest.mark.parametrize("neg_eigval", ["both", "erase"])
def test_doubling_acts_on_erase_and_write_or_on_erase_alone(neg_eigval: str) -> None:
    plain = DeltaRuleAttention("delta_net", 16, 2, 8, layer_idx=0).double()
    doubled = DeltaRuleAttention("neg_delta_net", 16, 2, 8, neg_eigval=neg_eigval, layer_idx=0).double()
    doubled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 2, 16, dtype=torch.float64)
    q, k, v = (
        torch.randn(1, 2, 2, 8).double(),
        l2_normalize(torch.randn(1, 2, 2, 8).double()),
        torch.randn(1, 2, 2, 8).double(),
    )
    b = plain.rule_inputs(LayerInput(x, plain), q, k, v).beta
    _, _, written, beta, *_ = doubled.rule_inputs(LayerInput(x, doubled), q, k, v)
    assert b is not None and beta is not None
    torch.testing.assert_close(beta, 2 * b)
    torch.testing.assert_close(beta[..., None] * written, (2 if neg_eigval == "both" else 1) * b[..., None] * v)


ALWAYS_FAST = {
    "comba", "comba_unit_erase", "delta_net", "eda", "efla", "falcon", "fg2_gdn", "gated_deltanet", "gated_deltanet2",
    "gated_efla", "gated_longhorn", "isotropic_kdn", "kaczmarz", "kda", "longhorn",
    "momentum",
}  # fmt: skip
"""Rules whose erase gain never exceeds 1; tests/rules/test_safety.py shows it."""


NEVER_DOUBLED = {"comba", "comba_unit_erase", "diagonal_kdn", "isotropic_kdn", "momentum", "q_delta"}
"""Rules that refuse `allow_neg_eigval`."""


@pytest.mark.parametrize("rule", [name for name in list_rules() if get_rule(name).corrects])
def test_layers_ask_for_fast_precision_where_no_gain_exceeds_one(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record_precision(monkeypatch, rule_functions)
    for layer in (make_layer(rule, 16, 2, 8), drop_in_class(rule)(rule, 16, 2, 8)):
        asked.clear()
        layer(torch.randn(1, 3, 16))
        assert set(asked) == {"fast" if rule in ALWAYS_FAST else None}
        if rule not in NEVER_DOUBLED:
            asked.clear()
            type(layer)(rule, 16, 2, 8, allow_neg_eigval=True)(torch.randn(1, 3, 16))
            assert set(asked) == {None}


def test_a_layer_of_another_class_or_step_size_leaves_the_precision_to_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LongerKeys(DeltaRuleAttention):
        def rule_inputs(self, *arguments: Tensor) -> RuleInputs:
            inputs = super().rule_inputs(*arguments)
            return inputs._replace(k=2 * inputs.k)

    asked = record_precision(monkeypatch, rule_functions)
    unknown = replace(get_rule("delta_net"), name="own", step_size=lambda b, k: 3 * b)
    raw_keys = replace(get_rule("delta_net"), name="raw", normalize_k=False)
    LongerKeys("delta_net", 16, 2, 8)(torch.randn(1, 3, 16))
    for spec in (unknown, raw_keys):
        DeltaRuleAttention(spec, 16, 2, 8)(torch.randn(1, 3, 16))
    assert asked == [None] * 3
    asked.clear()
    for layer in (DeltaNet, EFLA, GatedDeltaNet, KimiDeltaAttention, Longhorn):
        layer(16, 2, 8)(torch.randn(1, 3, 16))
    copy.deepcopy(drop_in_class("kda")("kda", 16, 2, 8))(torch.randn(1, 3, 16))
    assert asked == ["fast"] * 6
    asked.clear()

    class OwnComba(Comba):
        pass

    with forget_rules():
        register_rule(replace(get_rule("comba"), name="own_comba"), layer=OwnComba)
        for rule in ("comba", "own_comba"):
            OwnComba(rule, 16, 2, 8)(torch.randn(1, 3, 16))
        register_rule(get_rule("own_comba"), layer=OwnComba, gain_at_most_one=True)
        OwnComba("own_comba", 16, 2, 8)(torch.randn(1, 3, 16))
    assert asked == [None, None, "fast"]
    asked.clear()
    NegativeEigenvalueDeltaNet(16, 2, 8)(torch.randn(1, 3, 16))
    assert asked == [None]


@pytest.mark.parametrize("rule", ["fg2_gdn", "gated_deltanet2", "qed"])
def test_a_rule_with_gates_per_channel_takes_no_other_step_size(rule: str) -> None:
    with pytest.raises(ValueError, match=r"step_size='exact' cannot act: leave it at 'euler'"):
        make_layer(replace(get_rule(rule), step_size="exact"), 16, 2, 8)


def constant_input_layer() -> DeltaRuleAttention:
    """In bfloat16, with the step size at its limit of 2 and 32 heads to find a long key among."""
    layer = DeltaRuleAttention("neg_delta_net", 16, 32, 16, beta_bias=True, initializer_range=0.5, layer_idx=0)
    torch.nn.init.constant_(layer.b_proj.bias, 1e4)
    return layer.bfloat16()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_layer_fed_one_token_for_ever_stays_bounded_thanks_to_the_guard(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:
        monkeypatch.setattr(rule_functions, "bounded_step", lambda beta, k, **options: beta)
    layer, states = constant_input_layer(), LayerStates()
    with torch.no_grad():
        layer(torch.randn(1, 1, 16, dtype=torch.bfloat16).expand(1, 4096, 16), past_key_values=states)
    largest = states.states[0].recurrent.abs().max()
    assert (largest < 100) if guarded else not (largest < 1e4)


def test_step_sizes_gates_and_activations_are_functions_given_to_the_spec() -> None:
    def half(b: Tensor, k: Tensor) -> Tensor:
        return b / 2

    def steady(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        return -torch.sigmoid(a) * A_log.exp()

    named = get_rule("gated_deltanet")
    spec = replace(named, name="own", step_size=half, decay_gate=steady, gate_activation=torch.tanh)
    layer = DeltaRuleAttention(spec, 16, 2, 8, num_v_heads=4, expand_v=1, initializer_range=0.5).double()
    x, k = torch.randn(1, 5, 16, dtype=torch.float64), l2_normalize(torch.randn(1, 5, 2, 8, dtype=torch.float64))
    _, _, _, beta, log_decay, _ = layer.rule_inputs(LayerInput(x, layer), k, k, torch.randn(1, 5, 4, 8).double())
    torch.testing.assert_close(beta, torch.sigmoid(layer.b_proj(x)) / 2)
    torch.testing.assert_close(log_decay, -torch.sigmoid(layer.a_proj(x)) * layer.A_log.exp())
    values, gate = torch.randn(2, 8).double(), torch.randn(2, 8).double()
    ungated = layer.o_norm(values, torch.full_like(gate, 20))  # where tanh is one
    torch.testing.assert_close(layer.o_norm(values, gate), ungated * gate.tanh())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"step_size": "eulr"}, "unknown step_size 'eulr'; did you mean 'euler'"),
        ({"decay": "scalar", "decay_gate": "softpuls"}, "unknown decay_gate 'softpuls'; did you mean 'softplus'"),
        ({"output_gate": "full", "gate_activation": "sliu"}, "unknown gate_activation 'sliu'; did you mean 'silu'"),
    ],
)
def test_a_misspelt_choice_raises_when_the_layer_is_made(choice: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaRuleAttention(replace(get_rule("delta_net"), **choice), 16, 2, 8)


def test_an_unknown_step_size_is_guarded_against_expansion() -> None:
    doubled = replace(get_rule("delta_net"), name="doubled", step_size=lambda b, k: 4 * b)
    k = l2_normalize(torch.randn(1, 6, 1, 8))
    beta = EffectiveStep(doubled, allow_neg_eigval=False)(torch.ones(1, 6, 1), k)
    torch.testing.assert_close(beta * k.square().sum(-1), torch.full((1, 6, 1), 2.0))


def test_the_bounded_gate_takes_the_place_of_the_softplus_gate_alone() -> None:
    spec = replace(get_rule("gated_deltanet"), decay_gate=lambda a, A_log, dt_bias: -a.exp())
    with pytest.raises(ValueError, match="takes the place of the softplus gate"):
        DeltaRuleAttention(spec, 16, 2, 8, decay_lower_bound=-5.0)


@pytest.mark.parametrize(
    ("step_size", "got"), [(lambda b, k: k, r"\(1, 5, 2, 4\)"), (lambda b, k: 0.5, "0.5")], ids=["shape", "number"]
)
def test_a_step_size_of_another_shape_is_refused(step_size: object, got: str) -> None:
    spec = replace(get_rule("delta_net"), name="own", step_size=step_size)
    with pytest.raises(ValueError, match=rf"the step size of 'own' must be .* \(1, 5, 2\), got {got}"):
        EffectiveStep(spec, allow_neg_eigval=False)(torch.rand(1, 5, 2), torch.randn(1, 5, 2, 4))


def test_a_decay_gate_of_another_shape_is_refused() -> None:
    spec = replace(get_rule("kda"), name="per_head", decay_gate=lambda a, A_log, dt_bias: -a[..., 0].exp())
    with pytest.raises(ValueError, match=r"the log-decay of 'per_head' must be \[B, T, HV, K\] .*, got \(1, 5, 2\)"):
        DeltaRuleAttention(spec, 16, 2, 8)(torch.randn(1, 5, 16))
