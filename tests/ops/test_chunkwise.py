"""The chunk form and its hand-written backward against the token loop.

In float64 the two agree to rounding. In other dtypes the chunk form may have twice the error of plain torch in that
dtype: of the token loop, or of the chunk equations written down naively. If keys repeat and beta exceeds 1, the
triangular system of a chunk is ill-conditioned, and the error is bounded by its condition number times the rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delta_rule_cases import (
    ALL_CASES,
    ERASE_CASES,
    GROWING_CASES,
    HARD_CASES,
    MICRO_STEP_CASES,
    SHAPE_CASES,
    DeltaRuleCase,
    random_cases,
    random_update_cases,
)
from helpers import assert_close_in_float64, assert_within_reference, results_and_gradients
from oracle import condition_of_chunks, delta_rule_by_chunks, delta_rule_by_transition_matrices
from torch import Tensor

from deltazoo.ops import delta_rule

pytestmark = pytest.mark.usefixtures("poisoned_empty")


UPDATE_CASES = [*ERASE_CASES, *GROWING_CASES, *MICRO_STEP_CASES, *random_update_cases(20, seed=4)]


@pytest.mark.parametrize("case", [*ALL_CASES, *random_cases(30, seed=2), *UPDATE_CASES], ids=str)
def test_chunkwise_equals_reference_in_outputs_and_every_gradient(case: DeltaRuleCase) -> None:
    inputs = case.make(dtype=torch.float64)
    actual = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    expected = results_and_gradients(delta_rule, inputs, backend="reference")
    assert_close_in_float64(actual, expected, inputs)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in ALL_CASES),
        *((case, torch.bfloat16) for case in HARD_CASES),
        *((case, torch.float32) for case in (*ERASE_CASES, *MICRO_STEP_CASES)),
        *((case, torch.bfloat16) for case in (*ERASE_CASES, *MICRO_STEP_CASES)[::3]),
        *((case, torch.float16) for case in SHAPE_CASES),
    ],
    ids=str,
)
def test_chunkwise_errs_at_most_twice_as_much_as_plain_torch(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    inputs = case.make(dtype=dtype)
    assert_within_reference(
        actual=results_and_gradients(delta_rule, inputs, backend="chunkwise"),
        exact=results_and_gradients(delta_rule, inputs.double(), backend="reference"),
        same_dtype=[
            results_and_gradients(delta_rule, inputs, backend="reference"),
            results_and_gradients(delta_rule_by_chunks, inputs),
        ],
        inputs=inputs,
        floor=condition_of_chunks(inputs.k, inputs.beta, inputs.erase_key) if case.repeats_keys else 2.0,
    )


GRADCHECK_CASES = [
    DeltaRuleCase("plain", B=1, T=3, H=1, K=2, V=3, initial_state=True),
    DeltaRuleCase("scalar_grouped", B=1, T=3, H=1, groups=2, K=2, V=1, decay="scalar", initial_state=True),
    DeltaRuleCase("channel", B=1, T=4, H=1, K=3, V=2, decay="channel", log_decay=-1.0, initial_state=True),
    DeltaRuleCase("two_chunks", B=1, T=66, H=1, K=2, V=1, decay="channel", initial_state=True),
    DeltaRuleCase("packed", lengths=(2, 0, 1), H=1, K=2, V=2, decay="scalar", initial_state=True),
    DeltaRuleCase("same_keys_beta_2", B=1, T=5, H=1, K=2, V=2, keys="same", beta=2.0),
    DeltaRuleCase("zero_keys", B=1, T=3, H=1, K=2, V=2, keys="zero", decay="channel", initial_state=True),
    DeltaRuleCase("erase", B=1, T=3, H=1, groups=2, K=2, V=2, decay="channel", erase="free", initial_state=True),
    DeltaRuleCase("undecayed", B=1, T=3, H=1, K=2, V=2, decay="scalar", erase="free", erase_reads="undecayed"),
    DeltaRuleCase("micro_steps", B=1, T=3, H=1, K=2, V=2, decay="scalar", num_micro_steps=2, initial_state=True),
    DeltaRuleCase(
        "micro_steps_undecayed",
        B=1,
        T=2,
        H=1,
        K=2,
        V=2,
        decay="channel",
        erase="free",
        erase_reads="undecayed",
        num_micro_steps=3,
    ),
]


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("case", GRADCHECK_CASES, ids=str)
def test_gradients_are_those_of_finite_differences(case: DeltaRuleCase, backend: str) -> None:
    inputs = case.make(dtype=torch.float64)
    names = list(inputs.leaves())

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments = {**inputs.arguments(), **dict(zip(names, tensors, strict=True))}
        return tuple(delta_rule(**arguments, backend=backend))

    leaves = [tensor.requires_grad_() for tensor in inputs.leaves().values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=case.T > 10)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "initial_state", "erase_key"])
def test_gradient_of_one_argument_alone_is_the_one_of_all_together(name: str, backend: str) -> None:
    inputs = DeltaRuleCase("alone", T=70, groups=2, decay="channel", erase="gated", initial_state=True).make()
    together = results_and_gradients(delta_rule, inputs, backend=backend)[f"d_{name}"]
    leaf = getattr(inputs, name).clone().requires_grad_()
    results = delta_rule(**{**inputs.arguments(), name: leaf}, backend=backend)
    differentiable = [
        (r, d) for r, d in zip(results, (inputs.d_output, inputs.d_final_state), strict=True) if r.requires_grad
    ]
    outputs, gradients = zip(*differentiable, strict=True)
    (alone,) = torch.autograd.grad(outputs, leaf, gradients)
    torch.testing.assert_close(alone, together)


@pytest.mark.parametrize("backend", ["reference", "chunkwise"])
@pytest.mark.parametrize("result", ["output", "final_state"])
def test_gradient_through_one_result_alone(result: str, backend: str) -> None:
    """A loss may use only the outputs, or only the state; the other's gradient is then absent, not zero-filled."""
    inputs = DeltaRuleCase("one_result", T=70, decay="channel", initial_state=True).make()

    def gradients(function: Callable[..., Any], **options: Any) -> list[Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.leaves().items()}
        value = getattr(function(**{**inputs.arguments(), **leaves}, **options), result)
        used = [leaf for n, leaf in leaves.items() if (n, result) != ("q", "final_state")]
        return list(torch.autograd.grad(value, used, getattr(inputs, f"d_{result}")))

    torch.testing.assert_close(gradients(delta_rule, backend=backend), gradients(delta_rule_by_transition_matrices))


def test_gradient_of_q_through_the_state_alone_is_zero_or_absent() -> None:
    inputs = DeltaRuleCase("q_unused", T=70).make()
    leaf = inputs.q.clone().requires_grad_()
    state = delta_rule(**{**inputs.arguments(), "q": leaf}, backend="chunkwise").final_state
    if state.requires_grad:
        (gradient,) = torch.autograd.grad(state, leaf, inputs.d_final_state, allow_unused=True)
        assert gradient is None or not gradient.any()
