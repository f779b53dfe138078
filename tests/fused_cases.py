"""Calls of fused functions, and how their tests judge them: against plain torch in float64, in every gradient.

Kernels run interpreted on a CPU, in a child process for each file (ops/fused/conftest.py), and compiled on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest
import torch
from helpers import Missed
from torch import Tensor

Results = dict[str, Tensor]

HALF = torch.float16


@dataclass(frozen=True)
class Case:
    """A call by a kernel or by plain torch."""

    name: str
    _: KW_ONLY
    dtype: torch.dtype = torch.float32

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        """Results and gradients by name; with a `dtype`, of the same inputs converted to it."""
        raise NotImplementedError

    def drawing(self, device: str, dtype: torch.dtype | None) -> Callable[..., Tensor]:
        """Normal numbers of a shape, rounded to the case's own dtype or to a `given` one, as an argument of `run`."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, given: torch.dtype | None = None, scale: float = 1) -> Tensor:
            own = given or self.dtype
            return (scale * torch.randn(shape, generator=generator)).to(own).to(device, dtype or own)

        return draw


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


def test_interpreted(case: Case, interpreted: dict[str, Results]) -> None:
    """Of every file that imports it; `case` is one of the file's `CASES`."""
    judge(case, interpreted[case.name])


@pytest.mark.gpu
def test_on_the_gpu(case: Case) -> None:
    """Of every file that imports it; `case` is one of the file's `CASES`, or of its `MORE_ON_A_GPU`."""
    judge(case, case.run("cuda", fused=True))


def opcheck(*calls: tuple[Any, ...]) -> None:
    """Fake results are as the real ones, in layout and storage too, and autograd's formula passes torch's tests."""
    for operator, *arguments in calls:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in arguments]
        torch.library.opcheck(operator.overload, leaves)
