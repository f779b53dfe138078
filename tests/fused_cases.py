"""Calls of fused functions, and how their tests judge them: against plain torch in float64, in every gradient.

Kernels run interpreted on a CPU, and compiled on a GPU. The interpreter must be chosen before Triton is imported. So
one child process for each file, `python test_SUBJECT.py FILE`, computes every case, and the tests check its results.
Triton's interpreter multiplies bfloat16 wrongly: half precision is float16 there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
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


def interpreted_results(file: str, folder: Path) -> dict[str, Results]:
    """What `python file FILE` has written."""
    path, here = folder / "results.pt", Path(__file__).resolve().parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, file, str(path)], env=environment, check=True, timeout=900)
    return torch.load(path)
