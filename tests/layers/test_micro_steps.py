"""Several Householder steps per token: against the equation written out, and the same numbers in every mode."""

from __future__ import annotations

import pytest
import torch
from few_rules import FEW_RULES
from transitions import factors_and_writes

import deltazoo  # noqa: F401  # registers the rules
from deltazoo.layers import DeltaRuleAttention, LayerInput, LayerStates, layer_class
from deltazoo.layers.rule import RuleInputs
from deltazoo.spec import get_rule

MAY_HAVE_STEPS = [v for v in FEW_RULES if get_rule(v).corrects and layer_class(v).projects_micro_steps]
"""Rules that project to the keys, values and step sizes of any number of steps."""


def make(rule: str, steps: int, **options) -> DeltaRuleAttention:
    layer = DeltaRuleAttention(
        rule, 24, 2, 8, num_v_heads=4, expand_v=1.0, num_micro_steps=steps, layer_idx=0, **options
    )
    return layer.double()


def by_hand(layer: DeltaRuleAttention, inputs: RuleInputs) -> torch.Tensor:
    """Output `[B, T, HV, V]` of the recurrence, one token's matrix after another."""
    state, outputs = None, []
    for t, (factor, write) in enumerate(zip(*(x.unbind(1) for x in factors_and_writes(layer, inputs)), strict=True)):
        state = factor @ state + write if outputs else write
        query = inputs.q[:, t].repeat_interleave(layer.num_v_heads // layer.num_heads, 1) * layer.head_k_dim**-0.5
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
# The rule's own code sees more heads; the steps are made of them by shared code.
@pytest.mark.parametrize("rule", MAY_HAVE_STEPS)
def test_the_equation_written_out(rule: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(rule, steps)
    seen = []
    original = layer.rule_inputs

    def record(*args) -> RuleInputs:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(layer, "rule_inputs", record)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    actual = layer(x)
    expected = layer.o_proj(layer._norm_and_gate(by_hand(layer, seen[0]), LayerInput(x, layer)).flatten(2))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", ["delta_net", "neg_delta_net", "gated_deltanet", "kda"])
def test_whole_split_stepped_packed_padded(rule: str) -> None:
    layer = make(rule, 2)
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        whole, second = layer(x), layer(x[:, 4:])
        states = LayerStates()
        split = [layer(x[:, :5], past_key_values=states), layer(x[:, 5:6], past_key_values=states)]
        split += [layer(x[:, 6:8], past_key_values=states), layer(x[:, 8:], past_key_values=states)]
        packed = layer(torch.cat([x, x[:, 4:]], 1), cu_seqlens=torch.tensor([0, 9, 14]))
        junk = torch.randn(1, 3, 24, dtype=torch.float64)
        mask = torch.tensor([[0] * 3 + [1] * 9])
        padded = layer(torch.cat([junk, x], 1), attention_mask=mask)
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(torch.cat(split, 1), whole, **tolerance)
    torch.testing.assert_close(packed, torch.cat([whole, second], 1), **tolerance)
    torch.testing.assert_close(padded[:, 3:], whole, **tolerance)


def test_every_parameter_gets_a_gradient_and_one_step_keeps_the_usual_names() -> None:
    layer = make("gated_deltanet", 3, allow_neg_eigval=True)
    layer(torch.randn(2, 6, 24, dtype=torch.float64)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
    one, plain = make("gated_deltanet", 1).state_dict(), DeltaRuleAttention("gated_deltanet", 24, 2, 8).state_dict()
    assert one.keys() == plain.keys()
    assert layer.state_dict()["k_proj.weight"].shape == (3 * 16, 24)
    assert layer.state_dict()["b_proj.weight"].shape == (3 * 4, 24)
    assert layer.state_dict()["a_proj.weight"].shape == (4, 24)
    assert "3 micro-steps" in repr(layer)


def test_two_reflections_in_one_token_rotate() -> None:
    """Two reflections make a rotation, which one symmetric Householder step cannot be."""
    angle = torch.tensor(0.4)
    k = torch.stack([torch.tensor([1.0, 0.0]), torch.stack([angle.cos(), angle.sin()])]).view(1, 1, 2, 2)
    inputs = RuleInputs(torch.ones(1, 1, 1, 2), k, torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2), 2.0), None)
    from deltazoo.ops import delta_rule

    q, k, v, beta, *_ = inputs.interleave(2)
    start = torch.eye(2).view(1, 1, 2, 2)
    final = delta_rule(q, k, v, beta, num_micro_steps=2, initial_state=start).final_state[0, 0]
    rotation = torch.stack([torch.stack([(2 * angle).cos(), -(2 * angle).sin()])])
    torch.testing.assert_close(final[:1], rotation, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.linalg.det(final), torch.tensor(1.0), rtol=1e-5, atol=1e-6)


def test_refuses_steps_that_cannot_act() -> None:
    with pytest.raises(ValueError, match="no correction term, so num_micro_steps=2 cannot act"):
        make("linear_attention", 2)
    with pytest.raises(ValueError, match="num_micro_steps must be at least 1, got 0"):
        make("delta_net", 0)
