"""Calls of fused functions, and how their tests judge them: against plain torch in float64, in every gradient.

Kernels run interpreted on a CPU, in a child process for each file (ops/fused/conftest.py), and compiled on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch
from helpers import Missed
from torch import Tensor

Results = dict[str, Tensor]

HALF = torch.float16


class Case(Protocol):
    """A call by a kernel or by plain torch: its results and gradients, by name."""

    name: str

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results: ...


def judge(case: Case, results: Results) -> None:
    """At most twice the error of plain torch in the same dtype, or four roundings of the largest value."""
    exact, plain = case.run("cpu", fused=False, dtype=torch.float64), case.run("cpu", fused=False)
    assert results.keys() == exact.keys()
    failures, sizes = [], []
    for name, expected in exact.items():
        actual = results[name].cpu()
        assert actual.dtype == plain[name].dtype and actual.shape == expected.shape, name
        error = (actual.double() - expected).abs().max() if expected.numel() else torch.tensor(0.0)
        allowed = 2 * (plain[name].double() - expected).abs().max() if expected.numel() else torch.tensor(0.0)
        rounding = 4 * torch.finfo(actual.dtype).eps * (expected.abs().max() if expected.numel() else 0)
        if not error <= allowed + rounding:
            failures.append(f"{name}: {error:.2e} above {allowed:.2e} + {rounding:.2e}")
            sizes.append(float(error))
    if failures:
        raise Missed("\n".join(failures), max(sizes))
