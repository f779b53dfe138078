"""The baseline without the correction term: a plain running sum of outer products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from helpers import assert_close_in_float64, assert_within_reference, results_and_gradients
from torch import Tensor

from deltazoo.ops import DeltaRuleOutput, linear_attention

pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [
    DeltaRuleCase("one_token", T=1, decay="scalar", initial_state=True),
    DeltaRuleCase("plain", T=130, H=3, K=20, V=12),
    DeltaRuleCase("scalar", T=65, groups=4, decay="scalar", initial_state=True),
    DeltaRuleCase("channel", T=200, groups=2, K=12, V=33, decay="channel", initial_state=True),
    DeltaRuleCase("mixed", T=130, decay="channel", log_decay="mixed", initial_state=True),
    DeltaRuleCase("resets", T=130, decay="scalar", log_decay="reset", initial_state=True),
    DeltaRuleCase("packed", lengths=(0, 1, 64, 70, 0), decay="channel", initial_state=True),
    DeltaRuleCase("same_keys", T=130, keys="same", decay="scalar", log_decay=-0.01),
]


def delta_rule_arguments_without_beta(*, beta: Tensor, **arguments: Any) -> DeltaRuleOutput:
    """Linear attention of a case's arguments. Zero times beta is added so that beta has a gradient."""
    output, state = linear_attention(**arguments)
    return DeltaRuleOutput(output + (0 * beta[..., None]).to(output.dtype), state)


def weighted_sums(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> DeltaRuleOutput:
    """The definition without any recurrence: o_t = scale * sum_s (q_t exp(g_s+1 + ... + g_t) k_s) v_s, in float64."""
    group, scale = v.shape[2] // k.shape[2], k.shape[-1] ** -0.5
    q, k = q.repeat_interleave(group, 2) * scale, k.repeat_interleave(group, 2)
    g = torch.zeros_like(k)
    if log_decay is not None:
        g = g + (log_decay if log_decay.ndim == 4 else log_decay[..., None])
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = v.new_zeros(q.shape[0], v.shape[2], k.shape[3], v.shape[3])
        if initial_state is not None:
            state = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(start, stop):
            factors = [g[:, s + 1 : t + 1].sum(1).exp() * k[:, s] for s in range(start, t + 1)]
            keys = torch.stack(factors, dim=1)  # [B, t - start + 1, HV, K]
            from_start = g[:, start : t + 1].sum(1).exp()
            scores = torch.einsum("bhk,bshk->bhs", q[:, t], keys)
            read = torch.einsum("bhs,bshv->bhv", scores, v[:, start : t + 1])
            outputs.append(read + torch.einsum("bhk,bhkv->bhv", q[:, t] * from_start, state))
        if stop > start:
            state = from_start[..., None] * state + torch.einsum("bshk,bshv->bhkv", keys, v[:, start:stop])
        states.append(state)
    return DeltaRuleOutput(torch.stack(outputs, dim=1) + 0 * beta[..., None], torch.cat(states))


def gradients(inputs: DeltaRuleInputs, backend: str) -> dict[str, Tensor]:
    results = results_and_gradients(delta_rule_arguments_without_beta, inputs, backend=backend)
    assert not results["d_beta"].any()
    return results


@pytest.mark.parametrize("case", [c for c in CASES if c.T <= 130], ids=str)
def test_reference_is_a_decayed_sum_of_outer_products(case: DeltaRuleCase) -> None:
    inputs = case.make()
    assert_close_in_float64(gradients(inputs, "reference"), results_and_gradients(weighted_sums, inputs), inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunkwise_equals_reference_in_outputs_and_every_gradient(case: DeltaRuleCase) -> None:
    inputs = case.make()
    assert_close_in_float64(gradients(inputs, "chunkwise"), gradients(inputs, "reference"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunkwise_errs_at_most_twice_as_much_as_the_loop(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    inputs = case.make(dtype=dtype)
    assert_within_reference(
        actual=gradients(inputs, "chunkwise"),
        exact=gradients(inputs.double(), "reference"),
        same_dtype=gradients(inputs, "reference"),
        inputs=inputs,
    )


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
def test_gradients_are_those_of_finite_differences(decay: str, backend: str) -> None:
    case = DeltaRuleCase("gradcheck", B=1, T=4, H=1, groups=2, K=2, V=3, decay=decay, initial_state=True)
    inputs = case.make()
    names = [name for name in inputs.leaves() if name != "beta"]
    leaves = [inputs.leaves()[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *tensors: tuple(linear_attention(**dict(zip(names, tensors, strict=True)), backend=backend)), leaves
    )
