"""No overflow and no lost accuracy: extreme decays and keys, long sequences, and the guard for beta near 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from helpers import assert_within_reference, relative_errors, results_and_gradients
from oracle import delta_rule_by_chunks, delta_rule_by_transition_matrices

from deltazoo.ops import delta_rule, step_size

BACKENDS = ("reference", "chunkwise")


def with_key_length(inputs: DeltaRuleInputs, length: float, rule: str) -> DeltaRuleInputs:
    """Keys of that length, and the effective step size that a rule gives them (b <= 1 where it is the gate itself)."""
    k = inputs.k * length
    b = inputs.beta / 2
    beta = {"euler": lambda: b, "exact": lambda: step_size.exact(b, k), "implicit": lambda: step_size.implicit(b, k)}
    return replace(inputs, k=k, beta=beta[rule]())


@pytest.mark.parametrize("g", [0.0, -1e-6, -5.0, -20.0, -80.0, -1e4, -torch.inf])
@pytest.mark.parametrize(
    ("length", "rule"),
    [(0.0, "exact"), (1e-20, "exact"), (1e-3, "implicit"), (1.0, "euler"), (30.0, "exact"), (1e4, "implicit")],
    ids=str,
)
@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_extreme_decays_and_keys_keep_every_result_finite_and_right(
    decay: str, length: float, rule: str, g: float
) -> None:
    case = DeltaRuleCase("extreme", T=70, H=1, K=8, V=6, decay=decay, initial_state=True)
    inputs = with_key_length(case.make(dtype=torch.float32), length, rule)
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, g))
    assert_within_reference(
        actual=results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        exact=results_and_gradients(delta_rule_by_transition_matrices, inputs.double()),
        same_dtype=[
            results_and_gradients(delta_rule, inputs, backend="reference"),
            results_and_gradients(delta_rule_by_chunks, inputs),
        ],
        inputs=inputs,
        floor=8.0,  # a result may be one product of few factors here, with nothing for rounding errors to average over
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_channel_forgets_while_the_others_remember_everything(backend: str) -> None:
    inputs = DeltaRuleCase("one_channel", T=130, K=8, decay="channel", beta=0.0, initial_state=True).make()
    log_decay = torch.zeros_like(inputs.log_decay)
    log_decay[:, 77, :, 3] = -torch.inf
    _, state = delta_rule(**replace(inputs, log_decay=log_decay).arguments(), backend=backend)
    kept = inputs.initial_state.clone()
    kept[:, :, 3] = 0
    assert torch.equal(state, kept)


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_forty_thousand_tokens_stay_finite_and_as_accurate_as_the_loop(decay: str) -> None:
    """The state after 43,884 tokens is that of its last 4,096 once decay has forgotten the rest."""
    case = DeltaRuleCase("long", B=1, T=43_884, H=1, K=16, V=8, decay=decay, log_decay=-0.05)
    inputs = case.make(dtype=torch.float32)
    results = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    assert all(tensor.isfinite().all() for tensor in results.values())
    if decay != "none":
        last = delta_rule(**inputs.tokens(43_884 - 4096, 43_884).arguments(), backend="chunkwise").final_state
        torch.testing.assert_close(results["final_state"], last)


def test_weak_decays_add_up() -> None:
    """4,096 tokens at -1e-4 leave exp(-0.4096) of the state: one rounding per chunk of 64, not one per token."""
    inputs = DeltaRuleCase("weak", B=1, T=4096, H=1, K=4, V=4, decay="scalar", beta=0.0, initial_state=True)
    inputs = inputs.make(dtype=torch.float32)
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, -1e-4))
    _, state = delta_rule(**inputs.arguments(), backend="chunkwise")
    expected = inputs.initial_state.double() * torch.tensor(-1e-4).double().mul(4096).exp()
    assert relative_errors({"state": state}, {"state": expected}, inputs)["state"] < 64 * 2**-24


def repeated_rounded_key(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest of 4,096 unit keys after rounding to bfloat16, repeated; a state along it; its squared length."""
    keys = torch.nn.functional.normalize(torch.randn(4096, 128, dtype=torch.float64), dim=-1).bfloat16().float()
    squared = keys.square().sum(-1)
    k = keys[squared.argmax()]
    state = (k / k.norm())[:, None] * torch.tensor([1.0, -2.0])
    return k.expand(1, tokens, 1, 128), state[None, None], squared.max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_guard_keeps_a_repeated_rounded_key_from_growing_the_state(backend: str) -> None:
    """beta = min(2, 2 / |k|^2) with the length of the rounded key: after 16,384 reflections the norm is what it was."""
    T = 16_384 if backend == "chunkwise" else 4096
    k, state, squared = repeated_rounded_key(T)
    assert squared > 1.001
    beta = torch.full((1, T, 1), 2.0).minimum(2 / squared)
    output, final_state = delta_rule(k, k, torch.zeros(1, T, 1, 2), beta, initial_state=state, backend=backend)
    assert final_state.norm() == pytest.approx(state.norm().item(), rel=1e-2)
    assert output.abs().max() <= 1.01 * output[:, 0].abs().max()


def test_without_the_guard_it_grows_by_orders_of_magnitude() -> None:
    """Why the guard is there: (2 |k|^2 - 1)^4096 with |k|^2 near 1.002."""
    k, state, squared = repeated_rounded_key(4096)
    _, final_state = delta_rule(
        k, k, torch.zeros(1, 4096, 1, 2), torch.full((1, 4096, 1), 2.0), initial_state=state, backend="chunkwise"
    )
    growth = (2 * squared.double() - 1) ** 4096
    assert growth > 1e3
    assert (final_state.norm() / state.norm()).item() == pytest.approx(growth.item(), rel=0.05)


@pytest.mark.parametrize("keys", ["same", "alternating"])
@pytest.mark.parametrize("beta", [1.0, 1.5, 1.8, 1.9, 1.98, 2.0])
def test_two_thousand_repeated_keys_stay_close_to_float64(beta: float, keys: str) -> None:
    """bfloat16 inputs, as in a negative-eigenvalue model on parity: 0.05 at most on every result and gradient."""
    case = DeltaRuleCase("repeated", B=1, T=2048, H=2, K=64, V=16, keys=keys, beta=beta, initial_state=True)
    inputs = case.make(dtype=torch.bfloat16)
    inputs = replace(inputs, beta=inputs.beta.minimum(2 / inputs.k.float().square().sum(-1)))
    errors = relative_errors(
        results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        results_and_gradients(delta_rule, inputs.double(), backend="chunkwise"),
        inputs,
    )
    assert max(errors.values()) < 0.05, errors
