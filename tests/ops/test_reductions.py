"""Rules that equal each other for some arguments: docs/math.md's list of reductions, in both torch backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase
from helpers import results_and_gradients
from torch import Tensor

from deltazoo.ops import delta_rule, step_size

pytestmark = pytest.mark.parametrize("backend", ["reference", "chunkwise"])

CASE = DeltaRuleCase("reduction", T=130, groups=2, K=12, V=20, initial_state=True)


def arguments(**changes: Any) -> dict[str, Any]:
    return CASE.make().arguments() | changes


def scalar_decay() -> Tensor:
    return -torch.rand(2, 130, 4, dtype=torch.float64)


def test_equal_channels_are_one_scalar_decay(backend: str) -> None:
    g = scalar_decay()
    per_channel = g[..., None].expand(2, 130, 4, 12)
    torch.testing.assert_close(
        delta_rule(**arguments(log_decay=per_channel), backend=backend),
        delta_rule(**arguments(log_decay=g), backend=backend),
    )


def test_gradient_of_a_scalar_decay_is_the_sum_over_equal_channels(backend: str) -> None:
    g = scalar_decay()
    leaves = [g.clone().requires_grad_(), g[..., None].repeat(1, 1, 1, 12).requires_grad_()]
    gradients = []
    for leaf in leaves:
        output, state = delta_rule(**arguments(log_decay=leaf), backend=backend)
        gradients += torch.autograd.grad(output.square().sum() + state.square().sum(), leaf)
    torch.testing.assert_close(gradients[0], gradients[1].sum(-1))


@pytest.mark.parametrize("kind", ["scalar", "channel"])
def test_log_decay_zero_is_no_decay(kind: str, backend: str) -> None:
    zero = torch.zeros((2, 130, 4) if kind == "scalar" else (2, 130, 4, 12), dtype=torch.float64)
    torch.testing.assert_close(
        delta_rule(**arguments(log_decay=zero), backend=backend), delta_rule(**arguments(), backend=backend)
    )


def test_beta_zero_leaves_only_decay(backend: str) -> None:
    g = scalar_decay()
    inputs = arguments(log_decay=g, beta=torch.zeros(2, 130, 4, dtype=torch.float64))
    output, state = delta_rule(**inputs, backend=backend)
    decayed = g.cumsum(1).exp()
    q = inputs["q"].repeat_interleave(2, dim=2) * 12**-0.5
    expected = torch.einsum("bthk,bhkv->bthv", q, inputs["initial_state"]) * decayed[..., None]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(state, inputs["initial_state"] * decayed[:, -1, :, None, None])


def test_one_token_from_nothing_is_beta_times_key_value(backend: str) -> None:
    inputs = DeltaRuleCase("one", T=1, groups=2, decay="scalar").make().arguments()
    output, state = delta_rule(**inputs, backend=backend)
    q, k = (inputs[name][:, 0].repeat_interleave(2, dim=1) for name in ("q", "k"))
    expected = inputs["beta"][:, 0, :, None, None] * k[..., None] * inputs["v"][:, 0, :, None, :]
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(output[:, 0], 16**-0.5 * (q[..., None] * expected).sum(-2))


def test_unit_key_and_beta_one_stores_the_value_exactly(backend: str) -> None:
    """After a write with beta = 1 the state answers the key with the value, whatever it held before."""
    inputs = DeltaRuleCase("store", T=1, beta=1.0, initial_state=True).make().arguments()
    _, state = delta_rule(**inputs, backend=backend)
    torch.testing.assert_close(torch.einsum("bhk,bhkv->bhv", inputs["k"][:, 0], state), inputs["v"][:, 0])


def test_beta_two_on_a_unit_key_reflects(backend: str) -> None:
    """With beta = 2 and v = 0 the same key twice gives the state back: the eigenvalue along it is -1."""
    inputs = DeltaRuleCase("reflect", T=2, keys="same", beta=2.0, initial_state=True).make().arguments()
    inputs["v"] = torch.zeros_like(inputs["v"])
    once = delta_rule(
        **{n: x[:, :1] if x is not None and n not in ("initial_state",) else x for n, x in inputs.items()}
    )
    twice = delta_rule(**inputs, backend=backend).final_state
    along_key = torch.einsum("bhk,bhkv->bhv", inputs["k"][:, 0], inputs["initial_state"])
    torch.testing.assert_close(torch.einsum("bhk,bhkv->bhv", inputs["k"][:, 0], once.final_state), -along_key)
    torch.testing.assert_close(twice, inputs["initial_state"])


def test_halving_values_turns_double_beta_into_double_erase_alone(backend: str) -> None:
    """Erase with 2b and write with b is the same model as beta = 2b with the values halved."""
    inputs = arguments()
    b = inputs["beta"] / 2
    halved = delta_rule(**inputs | {"beta": 2 * b, "v": inputs["v"] / 2}, backend=backend)
    S, k, v = inputs["initial_state"], inputs["k"].repeat_interleave(2, dim=2), inputs["v"]
    for t in range(130):
        k_t, b_t = k[:, t, :, :, None], b[:, t, :, None, None]
        S = S - 2 * b_t * k_t @ (k_t.mT @ S) + b_t * k_t @ v[:, t, :, None, :]
    torch.testing.assert_close(halved.final_state, S)


def test_exact_step_tends_to_the_plain_delta_rule_for_small_steps(backend: str) -> None:
    """EFLA with b -> 0 is DeltaNet with the same b, the difference falling as b^2."""
    inputs = arguments()
    differences = []
    for size in (1e-2, 1e-3):
        b = size * inputs["beta"]
        exact = delta_rule(**inputs | {"beta": step_size.exact(b, inputs["k"])}, backend=backend).final_state
        plain = delta_rule(**inputs | {"beta": step_size.euler(b)}, backend=backend).final_state
        differences.append((exact - plain).norm().item())
    assert differences[1] < differences[0] / 80


def test_exact_step_on_unit_keys_is_one_minus_exp_of_minus_b(backend: str) -> None:
    inputs = arguments()
    exact = delta_rule(**inputs | {"beta": step_size.exact(inputs["beta"], inputs["k"])}, backend=backend)
    plain = delta_rule(**inputs | {"beta": -torch.expm1(-inputs["beta"])}, backend=backend)
    torch.testing.assert_close(exact, plain)


def test_exact_step_solves_the_differential_equation(backend: str) -> None:
    """One EFLA token equals many small Euler steps of dS/dt = k (v - k^T S) over time b; keys are not unit here."""
    inputs = DeltaRuleCase("ode", T=1, initial_state=True).make().arguments()
    inputs["k"] = inputs["k"] * 1.7
    exact = delta_rule(**inputs | {"beta": step_size.exact(inputs["beta"], inputs["k"])}, backend=backend).final_state
    errors = []
    for steps in (200, 400):
        many = {n: inputs[n].expand(-1, steps, *inputs[n].shape[2:]) for n in ("q", "k", "v", "beta")}
        many["beta"] = many["beta"] / steps
        euler = delta_rule(**many, initial_state=inputs["initial_state"], backend=backend).final_state
        errors.append((euler - exact).norm().item())
    assert errors[1] < 0.55 * errors[0] and errors[1] < 1e-2 * exact.norm().item()


def test_implicit_step_minimises_the_proximal_objective(backend: str) -> None:
    """One Longhorn token is the minimum over S of |S - S_0|^2 + b |S^T k - v|^2: its gradient vanishes there."""
    inputs = DeltaRuleCase("proximal", T=1, initial_state=True).make().arguments()
    inputs["k"] = inputs["k"] * 1.7
    beta = step_size.implicit(inputs["beta"], inputs["k"])
    state = delta_rule(**inputs | {"beta": beta}, backend=backend).final_state.requires_grad_()
    k, v, b = inputs["k"][:, 0], inputs["v"][:, 0], inputs["beta"][:, 0]
    misfit = torch.einsum("bhk,bhkv->bhv", k, state) - v
    objective = (state - inputs["initial_state"]).square().sum() + (b[..., None] * misfit.square()).sum()
    (gradient,) = torch.autograd.grad(objective, state)
    assert gradient.abs().max() < 1e-12


def test_minus_infinity_starts_a_new_sequence(backend: str) -> None:
    """A log-decay of -inf at a token does what a boundary in cu_seqlens before that token does, gradients included."""
    inputs = DeltaRuleCase("reset", B=1, T=130, decay="channel").make()
    g = inputs.log_decay.clone()
    g[:, [40, 41, 64, 100]] = -torch.inf
    boundaries = torch.tensor([0, 40, 41, 64, 100, 130])
    d_last_state = torch.cat([torch.zeros(4, 2, 16, 24, dtype=torch.float64), inputs.d_final_state])
    reset = results_and_gradients(delta_rule, replace(inputs, log_decay=g), backend=backend)
    packed = results_and_gradients(
        delta_rule, replace(inputs, cu_seqlens=boundaries, d_final_state=d_last_state), backend=backend
    )
    assert not reset["d_log_decay"][:, [40, 41, 64, 100]].any(), "no noise: what comes before may multiply it by inf"
    packed["final_state"] = packed["final_state"][-1:]
    packed["d_log_decay"][:, [0, 40, 41, 64, 100]] = 0  # decays nothing: the sequence starts here
    reset["d_log_decay"][:, 0] = 0
    for name, tensor in packed.items():
        torch.testing.assert_close(reset[name], tensor)
