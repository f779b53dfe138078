"""What the shared layer does for any rule: casts, gates, state, options, errors, and reductions between rules."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltazoo import layers
from deltazoo.layers import (
    DeltaRuleAttention,
    LayerInput,
    LayerState,
    LayerStates,
    RuleInputs,
    describe_sequences,
    make_layer,
)
from deltazoo.layers.layer_options import check_shares
from deltazoo.spec import get_rule, list_rules, registered_layer

HIDDEN, HEADS, HEAD_DIM = 32, 2, 8
GATED = ["gated_deltanet", "kda", "mamba2_style"]


def make(rule: str = "gated_deltanet", **options: object) -> DeltaRuleAttention:
    return DeltaRuleAttention(rule, HIDDEN, HEADS, HEAD_DIM, layer_idx=0, **options)  # type: ignore[arg-type]


def tokens(num_tokens: int = 9, batch_size: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch_size, num_tokens, HIDDEN, dtype=dtype)


# Gate parameters keep float32.


@pytest.mark.parametrize("rule", GATED)
@pytest.mark.parametrize(
    "cast",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to("cpu", torch.half)],
)
def test_gate_parameters_stay_float32_bit_for_bit(rule: str, cast: object) -> None:
    layer = nn.Sequential(make(rule))
    before = {name: layer[0].get_parameter(name).detach().clone() for name in ("A_log", "dt_bias")}
    cast(layer)  # type: ignore[operator]
    assert layer[0].q_proj.weight.dtype in (torch.bfloat16, torch.float16)
    for name, value in before.items():
        assert torch.equal(layer[0].get_parameter(name), value)
        assert layer[0].get_parameter(name).dtype == torch.float32


def test_gradients_of_gate_parameters_stay_float32_too() -> None:
    layer = make()
    layer(tokens()).sum().backward()
    gradient = layer.A_log.grad.clone()  # type: ignore[union-attr]
    layer.bfloat16()
    assert torch.equal(layer.A_log.grad, gradient)  # type: ignore[arg-type]


def test_gate_parameters_may_widen() -> None:
    layer = make().double()
    assert layer.A_log.dtype == torch.float64
    assert layer.bfloat16().A_log.dtype == torch.float32


def test_gates_are_marked_and_stay_marked_when_they_leave_the_meta_device() -> None:
    with torch.device("meta"):
        layer = make("kda")
    layer = layer.bfloat16().to_empty(device="cpu")
    for name in ("A_log", "dt_bias"):
        parameter = layer.get_parameter(name)
        assert parameter._no_weight_decay  # type: ignore[attr-defined]
        assert parameter.dtype == torch.float32 and parameter.device.type == "cpu"


@pytest.mark.parametrize("rule", GATED)
def test_a_bfloat16_layer_computes_its_gates_in_float32(rule: str) -> None:
    layer = make(rule).bfloat16()
    q = torch.randn(2, 9, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    inputs = layer.rule_inputs(LayerInput(tokens().bfloat16(), layer), q, q, q.repeat(1, 1, 1, 2))
    assert inputs.log_decay is not None and inputs.log_decay.dtype == torch.float32
    assert (inputs.log_decay.bfloat16() != inputs.log_decay).any()
    if inputs.beta is not None:
        assert inputs.beta.dtype == torch.float32
        assert (inputs.beta.bfloat16() != inputs.beta).any()


# Options.


@pytest.mark.parametrize("num_v_heads", [2, 4, 6])
@pytest.mark.parametrize("rule", ["gated_deltanet", "kda", "efla"])
def test_grouped_value_heads_equal_repeated_key_heads(rule: str, num_v_heads: int) -> None:
    grouped = make(rule, num_v_heads=num_v_heads).double()
    full = DeltaRuleAttention(rule, HIDDEN, num_v_heads, HEAD_DIM).double()
    weights = grouped.state_dict()
    for name in ("q_proj", "k_proj", "q_conv1d", "k_conv1d"):
        per_head = weights[f"{name}.weight"].unflatten(0, (HEADS, HEAD_DIM))
        weights[f"{name}.weight"] = per_head.repeat_interleave(num_v_heads // HEADS, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x = tokens(dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("delta_net", {"use_short_conv": False}),
        ("delta_net", {"conv_size": 2}),
        ("delta_net", {"num_v_heads": 4}),
        ("delta_net", {"expand_v": 1.5}),
        ("delta_net", {"allow_neg_eigval": True}),
        ("neg_delta_net", {"allow_neg_eigval": False}),
        ("neg_delta_net", {"neg_eigval": "erase"}),
        ("neg_gated_deltanet", {"neg_eigval": "erase"}),
        ("delta_net", {"beta_bias": True}),
        ("kda", {"decay_lower_bound": -5.0}),
        ("gated_deltanet", {"decay_lower_bound": -5.0}),
        ("delta_net", {"norm_eps": 1e-2}),
        ("delta_net", {"initializer_range": 0.1}),
        ("delta_net", {"conv_initializer_range": 0.02}),
        ("efla", {"allow_neg_eigval": True}),
        ("longhorn", {"allow_neg_eigval": True}),
    ],
    ids=str,
)
def test_every_option_acts(rule: str, options: dict) -> None:
    x = tokens()
    torch.manual_seed(1)
    plain = make(rule)
    torch.manual_seed(1)
    changed = make(rule, **options)
    same_parameters = {k: v.shape for k, v in plain.state_dict().items()} == {
        k: v.shape for k, v in changed.state_dict().items()
    }
    assert not same_parameters or not torch.allclose(plain(x), changed(x), rtol=1e-3)


def test_without_short_convolution_silu_remains_and_no_window_is_kept() -> None:
    layer, states = make("delta_net", use_short_conv=False), LayerStates()
    x = tokens(1)
    y = layer(x, past_key_values=states)
    assert states.states[0].conv is None
    v = nn.functional.silu(layer.v_proj(x)).view(2, 1, HEADS, HEAD_DIM)
    q, k = (
        layers.l2_normalize(nn.functional.silu(p(x)).view(2, 1, HEADS, HEAD_DIM)) for p in (layer.q_proj, layer.k_proj)
    )
    b = torch.sigmoid(layer.b_proj(x))
    o = (q * k).sum(-1, keepdim=True) * HEAD_DIM**-0.5 * b[..., None] * v
    torch.testing.assert_close(y, layer.o_proj(layer.o_norm(o).flatten(2)))


def test_bounded_gate_stays_above_its_bound_and_starts_as_a_plain_sigmoid() -> None:
    layer = make("kda", decay_lower_bound=-5.0)
    assert torch.equal(layer.A_log, torch.zeros(HEADS))
    nn.init.constant_(layer.dt_bias, 30.0)
    q = torch.zeros(2, 9, HEADS, HEAD_DIM)
    log_decay = layer.rule_inputs(LayerInput(tokens(), layer), q, q, q).log_decay
    assert log_decay is not None
    torch.testing.assert_close(log_decay, torch.full_like(log_decay, -5.0))


def test_a_spec_may_be_passed_in_place_of_a_name() -> None:
    ungated = replace(get_rule("gated_deltanet"), output_gate="none")
    layer = DeltaRuleAttention(ungated, HIDDEN, HEADS, HEAD_DIM)
    assert not hasattr(layer, "g_proj")
    assert layer(tokens()).shape == (2, 9, HIDDEN)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("DeltaNet", "delta_net"),
        ("NegativeEigenvalueDeltaNet", "neg_delta_net"),
        ("GatedDeltaNet", "gated_deltanet"),
        ("EFLA", "efla"),
        ("KimiDeltaAttention", "kda"),
        ("Longhorn", "longhorn"),
        ("LinearAttention", "linear_attention"),
    ],
)
def test_named_layers_are_their_rules(name: str, rule: str) -> None:
    layer = getattr(layers, name)(HIDDEN, HEADS, HEAD_DIM, num_v_heads=4)
    assert layer.spec is get_rule(rule)
    assert layer(tokens()).shape == (2, 9, HIDDEN)


def test_heads_share_the_width_unless_told_otherwise() -> None:
    for layer in (layers.GatedDeltaNet(HIDDEN, 4), DeltaRuleAttention("gated_deltanet", HIDDEN, num_heads=4)):
        assert (layer.head_k_dim, layer.head_v_dim) == (8, 16)
        assert layer(tokens()).shape == (2, 9, HIDDEN)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got -4"):
        layers.GatedDeltaNet(HIDDEN, -4)
    with pytest.raises(ValueError, match="^GatedDeltaNet takes.*hidden_size=32 is no multiple of num_heads=5: pass"):
        layers.GatedDeltaNet(HIDDEN, 5)
    with pytest.raises(TypeError, match=r"^DeltaRuleAttention.__init__\(\) missing .* 'num_heads'"):
        layers.GatedDeltaNet(HIDDEN)  # type: ignore[call-arg]


def test_a_subclass_needs_to_override_rule_inputs_alone() -> None:
    class Forgetful(DeltaRuleAttention):
        def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
            inputs = super().rule_inputs(x, q, k, v)
            assert inputs.beta is not None
            return inputs._replace(log_decay=torch.full_like(inputs.beta, float("-inf")))

    layer = Forgetful("delta_net", HIDDEN, HEADS, HEAD_DIM, use_short_conv=False)
    x = tokens()
    whole = layer(x)
    alone = torch.cat([layer(x[:, t : t + 1]) for t in range(x.shape[1])], dim=1)
    torch.testing.assert_close(whole, alone)


def test_a_method_written_for_hidden_states_is_told_the_new_line() -> None:
    line = re.escape("`def rule_inputs(self, x, q, k, v)`, with x.hidden_states for the tensor")
    with pytest.raises(
        TypeError, match=rf"^Old\.rule_inputs gets a LayerInput in place of hidden_states now: write {line}"
    ):

        class Old(DeltaRuleAttention):
            def rule_inputs(self, hidden_states: Tensor, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
                return super().rule_inputs(hidden_states, q, k, v)

    class Mixin:
        def step_gate(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    with pytest.raises(TypeError, match=r"^Mixed\.step_gate gets a LayerInput .* `def step_gate\(self, x\)`"):

        class Mixed(Mixin, DeltaRuleAttention):
            pass

    class Unnamed(DeltaRuleAttention):
        def step_gate(self, h: Tensor) -> Tensor:
            return torch.sigmoid(self.project("b_proj", h))

    with pytest.raises(TypeError, match=r"^Unnamed\.project\('b_proj', x\) is x\.project\('b_proj'\) now"):
        Unnamed("gated_deltanet", 16, 2)(torch.randn(1, 3, 16))


def test_linear_maps_are_called_as_modules() -> None:
    layer, called = make("kda"), set()
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    layer(tokens())
    assert called == {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


# Reductions between rules.


def copy_shared(source: DeltaRuleAttention, target: DeltaRuleAttention) -> None:
    own = target.state_dict()
    shared = {name: p for name, p in source.state_dict().items() if name in own and own[name].shape == p.shape}
    target.load_state_dict(shared, strict=False)


def test_kda_with_equal_channels_is_a_scalar_gate() -> None:
    channel = replace(get_rule("gated_deltanet"), name="channel", decay="channel")
    gdn = make("gated_deltanet").double()
    kda = DeltaRuleAttention(channel, HIDDEN, HEADS, HEAD_DIM).double()
    copy_shared(gdn, kda)
    with torch.no_grad():
        kda.dt_bias.copy_(gdn.dt_bias.repeat_interleave(HEAD_DIM))
        kda.A_log.copy_(gdn.A_log)
        kda.f_proj[0].weight.zero_()
        kda.f_proj[0].weight[:HEADS] = gdn.a_proj.weight
        kda.f_proj[1].weight.zero_()
        for head in range(HEADS):
            kda.f_proj[1].weight[head * HEAD_DIM : (head + 1) * HEAD_DIM, head] = 1
    x = tokens(dtype=torch.float64)
    torch.testing.assert_close(kda(x), gdn(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("rule", "changes", "undecayed"),
    [
        ("delta_net", {"decay": "scalar"}, "delta_net"),
        ("mamba2_style", {"output_gate": "none"}, "linear_attention"),
    ],
)
def test_a_rule_that_never_forgets_is_the_one_without_decay(rule: str, changes: dict, undecayed: str) -> None:
    gated = replace(get_rule(rule), name="gated", **changes)
    with_gate, without = DeltaRuleAttention(gated, HIDDEN, HEADS, HEAD_DIM).double(), make(undecayed).double()
    copy_shared(without, with_gate)
    nn.init.constant_(with_gate.dt_bias, -1e4)
    x = tokens(dtype=torch.float64)
    torch.testing.assert_close(with_gate(x), without(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", ["efla", "longhorn"])
def test_small_gates_make_all_steps_euler_steps(rule: str) -> None:
    other = make(rule, beta_bias=True).double()
    raw = replace(get_rule("delta_net"), name="raw", normalize_k=False)
    euler = DeltaRuleAttention(raw, HIDDEN, HEADS, HEAD_DIM, beta_bias=True).double()
    nn.init.constant_(other.b_proj.bias, -18.0)  # b about 1e-8
    euler.load_state_dict(other.state_dict())
    x = tokens(dtype=torch.float64)
    torch.testing.assert_close(other(x), euler(x), rtol=1e-5, atol=1e-9)


def test_efla_on_unit_keys_is_delta_net_with_a_saturating_gate() -> None:
    unit = replace(get_rule("efla"), name="unit_efla", normalize_k=True)
    efla = DeltaRuleAttention(unit, HIDDEN, HEADS, HEAD_DIM).double()
    x = tokens(dtype=torch.float64)
    k = layers.l2_normalize(torch.randn(2, 9, HEADS, HEAD_DIM, dtype=torch.float64), eps=0)
    beta = efla.rule_inputs(LayerInput(x, efla), k, k, k).beta
    torch.testing.assert_close(beta, -torch.expm1(-torch.sigmoid(efla.b_proj(x))))


# State.


def test_the_layer_never_writes_into_a_state_it_was_given() -> None:
    layer, states = make(), LayerStates()
    with torch.no_grad():
        layer(tokens(), past_key_values=states)
        snapshot = states.snapshot()
        before = [x.clone() for x in states.states[0] if x is not None]
        first = layer(tokens(1), past_key_values=states)
        assert states.num_tokens[0] == 10 and snapshot.num_tokens[0] == 9
        assert all(torch.equal(x, y) for x, y in zip(before, snapshot.states[0][:2], strict=True))
    assert first.shape == (2, 1, HIDDEN)


def test_selected_rows_continue_like_themselves() -> None:
    layer, states = make(), LayerStates()
    rows = torch.tensor([1, 1, 0])
    with torch.no_grad():
        layer(tokens(), past_key_values=states)
        chosen = states.select(rows)
        x = tokens(2)
        expected = layer(x, past_key_values=states)[rows]
        torch.testing.assert_close(layer(x[rows], past_key_values=chosen), expected)


def test_gradients_flow_through_the_state() -> None:
    layer, states = make(), LayerStates()
    x, later = tokens(5).requires_grad_(), tokens(1)
    layer(x, past_key_values=states)
    layer(later, past_key_values=states).sum().backward()
    assert x.grad is not None and (x.grad.abs().sum((0, 2)) > 0).all()


@pytest.mark.parametrize("rule", ["gated_deltanet", "pgdn"])
def test_detached_states_stop_gradients_and_go_on(rule: str) -> None:
    """Truncated backpropagation through time, for states with and without an auxiliary one."""
    layer, states = make_layer(rule, HIDDEN, HEADS, HEAD_DIM, layer_idx=0), LayerStates()
    x = tokens(9)
    whole, outputs = layer(x).detach(), []
    for segment in x.split(3, dim=1):
        segment.requires_grad_()
        output = layer(segment, past_key_values=states)
        output.square().mean().backward()
        alone = segment.grad.clone()  # type: ignore[union-attr]
        kept, states = states, states.detach()
        assert all(before.requires_grad for before in kept.states[0] if before is not None)
        for before, after in zip(kept.states[0], states.states[0], strict=True):
            assert before is after is None or (torch.equal(before, after) and not after.requires_grad)
        layer(x[:, :1], past_key_values=states.snapshot()).sum().backward()
        assert torch.equal(segment.grad, alone)  # type: ignore[arg-type]
        outputs.append(output.detach())
    assert states.num_tokens == {0: 9}
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=1e-6)


def test_packed_sequences_continue_from_one_state_each() -> None:
    layer = make("kda").double()
    lengths = [4, 1, 3]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    first, second = tokens(8, 1, torch.float64), tokens(8, 1, torch.float64)
    packed, separate = LayerStates(), [LayerStates() for _ in lengths]
    for x in (first, second):
        whole = layer(x, cu_seqlens=bounds, past_key_values=packed)
        parts = [
            layer(x[:, start:stop], past_key_values=states)
            for start, stop, states in zip(bounds[:-1], bounds[1:], separate, strict=True)
        ]
        torch.testing.assert_close(whole, torch.cat(parts, dim=1), rtol=0, atol=1e-13)


def test_a_shared_description_equals_its_mask() -> None:
    layer, x = make(), tokens(4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])
    sequences = describe_sequences(2, 4, attention_mask=mask)
    assert torch.equal(layer(x, sequences=sequences), layer(x, attention_mask=mask))


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_v_heads": 3}, "num_v_heads=3 must be a multiple of num_heads=2"),
        ({"num_v_heads": 0}, "num_v_heads must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"head_dim": -8}, "head_dim must be at least 1, got -8"),
        ({"expand_v": 1.3}, r"expand_v=1.3 times head_dim=8 must be a positive whole number, got 10.4"),
        ({"expand_v": 0}, "must be a positive whole number, got 0"),
        ({"conv_size": 0}, "conv_size must be at least 1, got 0"),
        ({"conv_size": 7, "use_short_conv": False}, "conv_size=7 acts only with use_short_conv=True"),
        (
            {"conv_initializer_range": 0.02, "use_short_conv": False},
            "conv_initializer_range=0.02 acts only with use_short_conv=True",
        ),
        ({"conv_initializer_range": -1.0}, "conv_initializer_range must be finite and at least 0, got -1.0"),
        ({"conv_initializer_range": math.nan}, "conv_initializer_range must be finite and at least 0, got nan"),
        ({"conv_initializer_range": "0"}, "conv_initializer_range must be a number, got '0'"),
        ({"backend": "tritn"}, "unknown backend 'tritn'; did you mean 'triton'"),
        ({"neg_eigval": "write", "allow_neg_eigval": True}, "neg_eigval must be 'both' or 'erase', got 'write'"),
        ({"neg_eigval": "erase"}, "neg_eigval='erase' acts only with allow_neg_eigval=True"),
        ({"rule": "linear_attention", "allow_neg_eigval": True}, "'linear_attention' has no correction term"),
        ({"rule": "mamba2_style", "beta_bias": True}, "'mamba2_style' has no step size"),
        ({"rule": "gated_deltanet", "gate_bias": False}, "'gated_deltanet' has no low-rank output gate"),
        ({"rule": "efla", "decay_lower_bound": -5.0}, "'efla' has no decay"),
        ({"rule": "kda", "decay_lower_bound": 5.0}, "must be negative, got 5.0"),
        ({"rule": "kda", "decay_lower_bound": math.nan}, "decay_lower_bound must be finite, got nan"),
        ({"norm_eps": math.nan}, "norm_eps must be finite and positive, got nan"),
        ({"norm_eps": -1.0}, "norm_eps must be finite and positive, got -1.0"),
        ({"norm_eps": 0.0}, "norm_eps must be finite and positive, got 0.0"),
        ({"initializer_range": -1.0}, "initializer_range must be finite and at least 0, got -1.0"),
        ({"expand_v": math.nan}, "expand_v must be finite, got nan"),
        ({"num_heads": 2.0}, "num_heads must be a whole number, got 2.0"),
        ({"num_heads": True}, "num_heads must be a whole number, got True"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number, got '32'"),
        ({"conv_size": 2.5}, "conv_size must be a whole number, got 2.5"),
        ({"layer_idx": "0"}, "layer_idx must be a whole number, got '0'"),
        ({"expand_v": "2"}, "expand_v must be a number, got '2'"),
        ({"allow_neg_eigval": "no"}, "allow_neg_eigval must be True or False, got 'no'"),
        ({"use_short_conv": "no"}, "use_short_conv must be True or False, got 'no'"),
        ({"beta_bias": 1}, "beta_bias must be True or False, got 1"),
        ({"fused_kernels": "no"}, "fused_kernels must be True or False, got 'no'"),
        ({"rule": "gated_delta_net"}, "unknown rule 'gated_delta_net'; did you mean 'gated_deltanet'"),
    ],
    ids=str,
)
def test_options_that_cannot_act_are_refused(options: dict, message: str) -> None:
    arguments = {"rule": "delta_net", "hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": HEAD_DIM, **options}
    with pytest.raises(ValueError, match=message):
        DeltaRuleAttention(**arguments)


class _OwnOption(DeltaRuleAttention, stands_for=DeltaRuleAttention):
    def __init__(self, *args: Any, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    ("make_one", "option", "message"),
    [
        (layers.DeltaNet, "expand_k", r"DeltaNet: unknown option 'expand_k'; did you mean 'expand_v'\? known: hidden"),
        (partial(DeltaRuleAttention, "kda"), "conv_sise", "DeltaRuleAttention: unknown .*; did you mean 'conv_size'"),
        (partial(layers.make_layer, "comba"), "layer_id", "Comba: unknown option 'layer_id'; did you mean 'layer_idx'"),
        (partial(_OwnOption, "kda"), "temprature", "_OwnOption: unknown .*; did you mean 'temperature'"),
        (layers.GatedDeltaNet, "variant", "GatedDeltaNet: unknown option 'variant'; known: hidden_size, num_heads, "),
    ],
)
def test_an_unknown_option_names_the_nearest(make_one: Callable[..., Any], option: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_one(HIDDEN, HEADS, HEAD_DIM, **{option: 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": torch.zeros(2, 9, HIDDEN + 1)}, r"must be \[B, T, 32\], got \(2, 9, 33\)"),
        ({"hidden_states": torch.zeros(9, HIDDEN)}, r"must be \[B, T, 32\], got \(9, 32\)"),
        ({"attention_mask": torch.ones(2, 12, dtype=torch.long)}, r"must have shape \(2, 9\)"),
        ({"attention_mask": torch.full((2, 9), 2)}, "must hold only 0 and 1, got values from 2 to 2"),
        ({"cu_seqlens": torch.tensor([0, 18])}, "need batch size 1, got 2"),
        (
            {
                "sequences": describe_sequences(2, 9, attention_mask=torch.ones(2, 9, dtype=torch.long)),
                "cu_seqlens": torch.zeros(2),
            },
            "sequences already says",
        ),
    ],
    ids=["width", "rank", "mask", "numbers in the mask", "packed batch", "sequences and cu_seqlens"],
)
def test_bad_inputs_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(**{"hidden_states": tokens(), **arguments})


@pytest.mark.parametrize(
    ("batch_size", "num_tokens", "channels"), [(2, 9, 3), (2, 9, 10), (1, 1, 4), (2, 8, 4), (3, 9, 4)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_rotary_embedding_that_does_not_fit_is_refused(
    batch_size: int, num_tokens: int, channels: int, padded: bool
) -> None:
    """An odd number of channels would turn the wrong pairs, and one token's angles would turn all tokens."""
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5]) if padded else None
    rotary = (torch.ones(batch_size, num_tokens, channels),) * 2
    with pytest.raises(ValueError, match=r"cosines and sines \[2 or 1, 9, d\] with an even d of at most 8, got \("):
        make()(tokens(), attention_mask=mask, rotary=rotary)


def test_a_state_of_a_layer_with_convolutions_is_refused_without() -> None:
    states = LayerStates()
    make()(tokens(), past_key_values=states)
    with pytest.raises(ValueError, match=r"has a convolution state of shape \(2, .* the state of another layer"):
        make(use_short_conv=False)(tokens(), past_key_values=states)


def test_a_rule_that_is_no_name_is_refused() -> None:
    nothing: Any = None
    for make_one in (DeltaRuleAttention, layers.make_layer):
        with pytest.raises(TypeError, match="rule must be a rule's name or a RuleSpec, got None"):
            make_one(nothing, HIDDEN, HEADS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": [[[1.0]]]}, "hidden_states must be a tensor, got list"),
        ({"cu_seqlens": [0, 9]}, "cu_seqlens must be a tensor, got list"),
        ({"attention_mask": [[1] * 9]}, "attention_mask must be a tensor, got list"),
        ({"past_key_values": {}}, "must hold states as deltazoo.LayerStates.* does .*, got dict"),
        ({"past_key_values": ()}, "got tuple"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()(**{"hidden_states": tokens(batch_size=1), **arguments})


@pytest.mark.parametrize("options", [{}, {"rule": "kda", "use_short_conv": False}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "num_tokens"), [(0, 5), (2, 0), (0, 0)])
def test_without_rows_or_without_tokens(rows: int, num_tokens: int, padded: bool, options: dict) -> None:
    layer, states = make(**options), LayerStates()
    mask = torch.ones(rows, num_tokens, dtype=torch.long) if padded else None
    x = tokens(num_tokens, rows).requires_grad_()
    y = layer(x, attention_mask=mask, past_key_values=states)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    if num_tokens == 0:
        later = tokens(3, rows)
        torch.testing.assert_close(layer(later, past_key_values=states.snapshot()), layer(later))
    with torch.no_grad():
        assert layer(tokens(1, rows), past_key_values=states).shape == (rows, 1, HIDDEN)


def test_a_state_needs_a_place() -> None:
    with pytest.raises(ValueError, match="construct the layer with layer_idx"):
        DeltaRuleAttention("delta_net", HIDDEN, HEADS, HEAD_DIM)(tokens(), past_key_values=LayerStates())


@pytest.mark.parametrize(
    ("conv", "recurrent", "message"),
    [
        (None, (2, HEADS, HEAD_DIM, HEAD_DIM), r"must have shape \(2, 48, 3\), got None"),
        ((2, 40, 3), (2, HEADS, HEAD_DIM, HEAD_DIM), r"got \(2, 40, 3\)"),
        ((3, 48, 3), (3, HEADS, HEAD_DIM, HEAD_DIM), r"must have shape \(2, 48, 3\), got \(3, 48, 3\)"),
        ((2, 48, 3), (2, HEADS, HEAD_DIM, 2 * HEAD_DIM), "initial_state must have shape"),
    ],
)
def test_a_state_of_another_layer_is_refused(conv: tuple | None, recurrent: tuple, message: str) -> None:
    states = LayerStates()
    states.set_state(0, LayerState(None if conv is None else torch.zeros(conv), torch.zeros(recurrent)), 1)
    with pytest.raises(ValueError, match=message):
        make("delta_net")(tokens(), past_key_values=states)


def test_a_layer_beyond_the_depth_of_its_model_is_refused() -> None:
    with pytest.raises(ValueError, match="layer_idx=4 must be at least 0 and less than num_layers=4"):
        layers.make_layer("lightning_attention", HIDDEN, HEADS, HEAD_DIM, layer_idx=4, num_layers=4)


@pytest.mark.parametrize(
    "rule", ["kda", *(pytest.param(x, marks=pytest.mark.slow) for x in ("neg_gated_deltanet", "efla"))]
)
def test_compiles_into_one_graph(rule: str) -> None:
    torch.compiler.reset()
    layer = make(rule)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = tokens()
    torch.testing.assert_close(compiled(x), layer(x))
    states, compiled_states = LayerStates(), LayerStates()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]])
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(x, attention_mask=mask, past_key_values=compiled_states),
            layer(x, attention_mask=mask, past_key_values=states),
        )
        torch.testing.assert_close(
            compiled(x[:, :1], past_key_values=compiled_states), layer(x[:, :1], past_key_values=states)
        )


def test_hooks_of_a_convolution_see_every_token() -> None:
    layer, states, seen = make(), LayerStates(), []
    layer.k_conv1d.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    with torch.no_grad():
        for num_tokens in (3, 1, 1):
            layer(torch.randn(1, num_tokens, layer.hidden_size), past_key_values=states)
    assert seen == [3, 1, 1]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (make(), "num_heads=2 of layer 0 is no multiple of the 3 ranks"),
        (make("delta_net", num_micro_steps=2), "needs num_micro_steps=1, got 2"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(layer: DeltaRuleAttention, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shares(layer, 3)


@pytest.mark.parametrize("rule", [rule for rule in list_rules() if registered_layer(rule)])
def test_layers_of_rules_declare_how_ranks_share_what_they_add(rule: str) -> None:
    layer = make_layer(rule, HIDDEN, HEADS, HEAD_DIM, layer_idx=0)
    if layer.projected_steps == 1:
        check_shares(layer, 2)
