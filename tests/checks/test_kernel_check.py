"""The self-check passes what is right, fails what is wrong, and survives a process that dies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltazoo.checks import kernel_check
from deltazoo.checks.kernel_check import Case, Verdict, cases, check_case, plain_bounds, run_selfcheck
from deltazoo.ops import delta_rule

SMALL = [
    Case("none", 16, 8, T=70),
    Case("scalar", 16, 8, B=1, T=40, HV=4, lengths=(30, 0, 1, 9), initial_state=True),
    Case("channel", 16, 8, T=33, dtype="float16", mean_log_decay=-5.0),
    Case("scalar", 16, 8, T=90, keys="alternating", beta=2.0, mean_log_decay=-1e-3),
]
UPDATES = [
    Case("scalar", 16, 8, T=70, erase="gated", erase_reads="undecayed", initial_state=True),
    Case("scalar", 16, 8, B=1, T=40, HV=4, lengths=(30, 0, 1, 9), erase="free", beta=0.3, num_micro_steps=3),
    Case("channel", 16, 8, T=70, erase="opposite", beta=0.05, mean_log_decay=-5.0),
    Case("none", 16, 8, T=70, erase="orthogonal", beta=0.3, num_micro_steps=2),
]
STEP = Case("channel", 16, 8, T=1, HV=4, initial_state=True, step=True)
MICRO_STEPS = replace(STEP, erase="gated", erase_reads="undecayed", num_micro_steps=3)


def verdicts(selected: list[Case], jobs: int = 0) -> list[Verdict]:
    return list(run_selfcheck(backend="chunkwise", device="cpu", jobs=jobs, selected=selected))


def test_the_chunk_form_passes_and_every_tensor_is_looked_at() -> None:
    found = verdicts([*SMALL, *UPDATES, STEP, MICRO_STEPS])
    assert all(verdict.passed for verdict in found), found
    assert check_case(STEP, "chunkwise", "cpu").keys() == {"output", "final_state", "repeat"}
    names = {"output", "final_state", "repeat"} | {f"d_{name}" for name in ("q", "k", "v", "beta")}
    assert check_case(SMALL[0], "chunkwise", "cpu").keys() == names
    assert check_case(SMALL[1], "chunkwise", "cpu").keys() == names | {"d_log_decay", "d_initial_state"}
    assert check_case(UPDATES[3], "chunkwise", "cpu").keys() == names | {"d_erase_key"}


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_wrong_gradient_of_one_argument_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    def wrong(q, k, v, beta, log_decay, **options):
        beta = beta if beta.dtype == torch.float64 else Spoil.apply(beta)
        return delta_rule(q, k, v, beta, log_decay, **options)

    monkeypatch.setattr(kernel_check, "delta_rule", lambda *a, **k: wrong(*a, **k))
    for verdict in verdicts(SMALL):
        assert not verdict.passed and verdict.tensor == "d_beta"


def test_results_that_change_from_run_to_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter([0.0, 1e-7, 0.0])

    def shaky(**arguments):
        output, state = delta_rule(**arguments)
        return output, state + next(noise)

    monkeypatch.setattr(kernel_check, "delta_rule", shaky)
    [verdict] = verdicts(SMALL[:1])
    assert not verdict.passed and verdict.tensor == "repeat"


@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_plain_torch_widens_a_bound_for_step_sizes_up_to_1(monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    """One key repeats, and plain torch with rounded operands misses the tolerance in d_v and d_beta."""
    case = Case("channel", 16, 8, T=300, keys="repeated", beta=beta, mean_log_decay=-1e-3, initial_state=True)
    bounds = plain_bounds(case, "cpu")
    assert bounds["output"] == case.tolerance < bounds["d_beta"] < 0.5 or beta > 1
    for factor in (0.99, 1.01):
        errors = {"d_beta": factor * bounds["d_beta"], "output": 0.99 * case.tolerance, "repeat": 0.0}
        monkeypatch.setattr(kernel_check, "check_case", lambda *_, errors=errors: errors)
        [verdict] = verdicts([case])
        assert verdict.passed == (factor < 1 and beta <= 1)
        assert verdict.tensor == "d_beta" or verdict.passed
        assert verdict.tolerance == (case.tolerance if beta > 1 or verdict.tensor == "output" else bounds["d_beta"])


def test_an_exception_is_a_failure_with_its_message() -> None:
    [verdict] = verdicts([replace(SMALL[0], keys="golden")])
    assert not verdict.passed and "golden" in verdict.message


def test_groups_run_in_processes_of_their_own() -> None:
    found = verdicts(SMALL[:2], jobs=2)
    assert [verdict.case for verdict in found] == [str(case) for case in SMALL[:2]]
    assert all(verdict.passed for verdict in found), found


def test_a_process_that_dies_fails_its_own_cases_only(monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = "import sys, os; from deltazoo.checks import kernel_check as s; s.check_case = lambda *_: os._exit(7)"
    monkeypatch.setattr(kernel_check, "_COMMAND", ["-c", f"{deadly}; s.main()"])
    found = verdicts([SMALL[0]], jobs=1)
    assert [(verdict.passed, verdict.message) for verdict in found] == [(False, "exit status 7")]


def test_the_cases_cover_what_has_kernels_of_its_own() -> None:
    every = cases()
    assert len(set(every)) == len(every)
    for decay in ("none", "scalar", "channel"):
        mine = [case for case in every if case.decay == decay]
        assert {(64, 64), (128, 128), (256, 512)} <= {(case.K, case.V) for case in mine}
        assert {case.dtype for case in mine} == {"bfloat16", "float16", "float32"}
        assert {case.keys for case in mine} == {"random", "repeated", "alternating", "correlated"}
        assert any(case.lengths for case in mine) and any(case.HV > case.H for case in mine)
        assert any(case.step for case in mine)
        assert {case.erase for case in mine} == {"tied", "gated", "free", "orthogonal", "opposite"}
        assert {case.num_micro_steps for case in mine} == {1, 2, 3}
        assert decay == "none" or any(case.erase_reads == "undecayed" for case in mine)
        assert max(case.T for case in mine) > 4096 and min(case.T for case in mine) == 1
