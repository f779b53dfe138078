"""Relative errors, and what plain torch with rounded operands reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.numerics import relative_errors
from deltazoo.checks.kernel_check import Case, case_inputs, case_results, plain_torch

CASES = [
    Case("none", 8, 12, T=70),
    Case("scalar", 8, 12, T=70, HV=4, initial_state=True),
    Case("channel", 8, 12, B=1, T=70, lengths=(20, 0, 50), initial_state=True),
    Case("scalar", 8, 12, T=40, erase="gated", erase_reads="undecayed", num_micro_steps=2, initial_state=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_torch_errs_by_the_rounding_of_its_operands(case: Case) -> None:
    inputs, cu_seqlens, *gradients = case_inputs(case, "cpu")
    exact_inputs = {name: None if x is None else x.double() for name, x in inputs.items()}
    options = {"cu_seqlens": cu_seqlens, **case.options}
    exact = case_results(exact_inputs, *(x.double() for x in gradients), backend="chunkwise", **options)
    worst = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = plain_torch(inputs, *gradients, **options, dtype=dtype)
        assert found.keys() == exact.keys()
        errors = relative_errors({n: x for n, x in found.items() if x.dtype == torch.float32}, exact, inputs)
        worst[dtype] = max(errors.values())
    assert 1e-3 < worst[torch.bfloat16] < 2e-2
    assert 1e-4 < worst[torch.float16] < worst[torch.bfloat16] / 4
    assert worst[torch.float32] < 1e-5


def test_errors_are_relative_and_none_where_a_result_is_not_finite() -> None:
    case = replace(CASES[1], dtype="float32")
    inputs, _, *gradients = case_inputs(case, "cpu")
    exact = {n: x.double() for n, x in case_results(inputs, *gradients, backend="chunkwise").items()}
    found = {name: 1.01 * x for name, x in exact.items()} | {"d_v": exact["d_v"] / 0}
    errors = relative_errors(found, exact, inputs)
    assert errors.pop("d_v") is None
    assert errors.pop("d_log_decay") <= 0.01 + 1e-6  # measured against the terms that cancel in it
    assert list(errors.values()) == pytest.approx([0.01] * len(errors))
    zero = {"output": torch.zeros(2, dtype=torch.float64)}
    assert relative_errors({"output": torch.full((2,), 3.0)}, zero, {}) == {"output": pytest.approx(18**0.5)}
