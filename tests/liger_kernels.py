"""What tests of Liger's kernels share: when they run, interpreting them on a CPU, and the check of their results.

The interpreter has to be chosen before Triton is imported, so a child process computes all cases of a test file:
`python FILE RESULTS` there calls `save_interpreted`. Triton's interpreter multiplies bfloat16 wrongly: half precision
is float16 there.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Results = dict[str, Tensor]

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel (the extra `fast`) is not installed"
)


def interpreted_results(file: str, folder: Path) -> dict[str, Results]:
    """Results of the child process of a test file, by case."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    out = folder / "results.pt"
    command = [sys.executable, "-W", "ignore", file, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out)


def save_interpreted(cases: list[Any], path: str) -> None:
    """Run the cases in the interpreter, extended by float arguments of kernels and libdevice's rsqrt."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import fused_add_rms_norm, rms_norm
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return converted(argument)

    interpreter._implicit_cvt = convert
    rms_norm.rsqrt = fused_add_rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    torch.save({case.name: case.run("cpu", liger=True) for case in cases}, path)


def judge(actual: Results, plain: Sequence[Results], exact: Results) -> None:
    """Every result errs at most twice as much as plain torch in the same dtype, and four roundings.

    The error of plain torch in one small tensor is partly chance. It counts as at least the root mean square of its
    errors in all results.

    Args:
        actual: results to judge, by name.
        plain: those of plain torch in the same dtype; of several runs the worst counts.
        exact: those of plain torch in float64.
    """
    assert all(results.keys() == exact.keys() for results in (actual, *plain))
    errors = {name: _relative_error(actual[name], x) for name, x in exact.items()}
    plain_errors = {name: max(_relative_error(run[name], x) for run in plain) for name, x in exact.items()}
    usual = math.sqrt(sum(error**2 for error in plain_errors.values()) / len(plain_errors))
    wrong = []
    for name, error in errors.items():
        assert actual[name].dtype == plain[0][name].dtype, (name, actual[name].dtype, plain[0][name].dtype)
        allowed = 2 * max(plain_errors[name], usual) + 2 * torch.finfo(actual[name].dtype).eps
        if not error <= allowed:
            wrong.append(f"{name}: relative error {error:.2e} > {allowed:.2e} (plain torch: {plain_errors[name]:.2e})")
    assert not wrong, f"{len(wrong)} of {len(errors)} (plain torch usually {usual:.2e}):\n" + "\n".join(wrong)


def _relative_error(x: Tensor, exact: Tensor) -> float:
    assert x.shape == exact.shape, (x.shape, exact.shape)
    if not x.isfinite().all():
        return math.inf
    error, size = (x.double() - exact.to(x.device)).norm().item(), exact.double().norm().item()
    return 0.0 if error == 0 else error / size if size else math.inf
