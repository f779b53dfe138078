"""How results are compared: against an exact answer, by what plain torch achieves in the same dtype."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleInputs
from interpreter import quicken_the_interpreter
from torch import Tensor

from deltazoo.ops import DeltaRuleOutput, delta_rule

quicken_the_interpreter()  # in children of the tests, which import this before they run a kernel


class Missed(AssertionError):
    """A result misses its limit; `size` says by how much, in the unit of the limit: the largest error, for example."""

    def __init__(self, message: str, size: float) -> None:
        super().__init__(message)
        self.size = size


@dataclass(frozen=True)
class known_miss:
    """An expected failure with a ceiling, for the part of a test that raises `Missed`:

        with known_miss("three TF32 products are not one of float32", at_most=8e-7):
            judge(...)

    Up to `at_most` the test counts as an expected failure, and its report says how large the miss was. Above it, or by
    any other error, the test fails. It fails too when nothing is missed, so that the expectation goes; but not on a GPU
    of another architecture than the H200's, where the misses were measured and others may have none.
    """

    reason: str
    at_most: float

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None and (not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)):
            pytest.fail(f"passes, so its known miss can go: {self.reason}")
        if not isinstance(error, Missed):
            return
        size = f"{error.size:.3g}, allowed up to {self.at_most:.3g}"
        if error.size <= self.at_most:
            pytest.xfail(f"{self.reason} (here {size})")
        raise AssertionError(f"worse than its known miss ({self.reason}): {size}\n{error}") from error


def record_precision(monkeypatch: pytest.MonkeyPatch, caller: ModuleType) -> list[str | None]:
    """The precision of every `delta_rule` that the module calls from here on."""
    asked = []

    def recording(*arguments: Any, **options: Any) -> DeltaRuleOutput:
        call = inspect.signature(delta_rule).bind(*arguments, **options)
        call.apply_defaults()
        asked.append(call.arguments["precision"])
        return delta_rule(*arguments, **options)

    monkeypatch.setattr(caller, "delta_rule", recording)
    return asked


def results_and_gradients(function: Callable[..., Any], inputs: DeltaRuleInputs, **options: Any) -> dict[str, Tensor]:
    """Calls ``function`` and sends gradients back through both results.

    Returns ``output``, ``final_state`` and ``d_<name>`` of every differentiable argument that is present.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.leaves().items()}
    output, final_state = function(**{**inputs.arguments(), **leaves}, **options)
    gradients = torch.autograd.grad(
        [output, final_state],
        list(leaves.values()),
        [inputs.d_output.to(output.dtype), inputs.d_final_state.to(final_state.dtype)],
    )
    named_gradients = {f"d_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}
    return {"output": output.detach(), "final_state": final_state.detach(), **named_gradients}


def error_sizes(exact: Mapping[str, Tensor], inputs: DeltaRuleInputs | None) -> dict[str, float]:
    """What the error of each result is measured against: its own norm, with one exception.

    The gradient of log_decay is a running sum over a chunk of ``q * dq - k * dk``, with ``+ e * de`` for an erase key
    (docs/math.md), whose terms cancel all but completely where the decay is strong. Rounding errors are as large as the
    terms, and add up over the sum as the root of its length, so they are measured against that.
    """
    sizes = {name: tensor.double().norm().item() for name, tensor in exact.items()}
    if inputs is not None and "d_log_decay" in exact:
        names = [name for name in ("q", "k", "erase_key") if f"d_{name}" in exact]
        terms = [(getattr(inputs, name).double() * exact[f"d_{name}"].double()).norm().item() for name in names]
        sizes["d_log_decay"] = max(sizes["d_log_decay"], 8 * sum(terms))
    return sizes


def relative_errors(
    actual: Mapping[str, Tensor], exact: Mapping[str, Tensor], inputs: DeltaRuleInputs | None
) -> dict[str, float]:
    """Norm of the error of every result over ``error_sizes``; NaN or inf in ``actual`` counts as infinitely wrong."""
    assert actual.keys() == exact.keys(), (actual.keys(), exact.keys())
    errors = {}
    for name, size in error_sizes(exact, inputs).items():
        a, e = actual[name].double().cpu(), exact[name].double().cpu()
        assert a.shape == e.shape, f"{name} has shape {tuple(a.shape)} where {tuple(e.shape)} was expected"
        error = (a - e).norm().item() if a.isfinite().all() else float("inf")
        errors[name] = 0.0 if error == 0 else error / size if size else float("inf")
    return errors


def assert_within_reference(
    actual: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    same_dtype: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    inputs: DeltaRuleInputs | None,
    *,
    factor: float = 2.0,
    floor: float = 2.0,
    rounding: torch.dtype | None = None,
) -> None:
    """Every tensor of ``actual`` errs at most ``factor`` times as much as plain torch does in the same dtype.

    Raises `Missed` with the largest relative error of those that err more.

    Args:
        actual: Results to judge, by name (see ``results_and_gradients``).
        exact: The float64 answer to the same (already rounded) inputs.
        same_dtype: What plain torch gives in the dtype of ``inputs``: its error, the worst one if there are several,
            sets the scale.
        inputs: What all of them were computed from; None: by a model, and every error is measured against its own norm.
        factor: How many times that error is allowed.
        floor: Allowed in any case, in units of the dtype's rounding error (half its epsilon), for inputs so short or so
            simple that plain torch happens to make no error at all.
        rounding: The dtype that ``floor`` refers to, where a kernel multiplies in fewer bits than its result has; the
            dtype of each result unless given.
    """
    plain = [same_dtype] if isinstance(same_dtype, Mapping) else same_dtype
    errors = relative_errors(actual, exact, inputs)
    plain_errors = [relative_errors(results, exact, inputs) for results in plain]
    failures, sizes = [], []
    for name, error in errors.items():
        allowed = max(e[name] for e in plain_errors)
        bound = factor * allowed + floor * torch.finfo(rounding or actual[name].dtype).eps / 2
        if not error <= bound:
            failures.append(f"{name}: relative error {error:.2e} > {bound:.2e} (plain torch: {allowed:.2e})")
            sizes.append(error)
    if failures:
        raise Missed("\n".join(failures), max(sizes))


def assert_close_in_float64(
    actual: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    inputs: DeltaRuleInputs,
    *,
    tolerance: float = 1e-12,
) -> None:
    """Two float64 computations of one quantity differ by rounding alone."""
    wrong = {n: f"{error:.1e}" for n, error in relative_errors(actual, exact, inputs).items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:.0e}: {wrong}"


def run_python(code: str, *arguments: str, timeout: float = 120) -> str:
    """Runs ``code`` in a fresh interpreter and returns what it printed; a failure shows its traceback."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
