"""The results of a file's cases by kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from fresh_process import run_interpreted
from fused_cases import Results, test_on_the_gpu

CHILD = """
import runpy, sys, torch

test = runpy.run_path(sys.argv[1])
for name, check in test.items():
    if name.startswith("check_"):
        check()
torch.save({case.name: case.run("cpu", fused=True) for case in test["CASES"]}, sys.argv[2])
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        more = getattr(metafunc.module, "MORE_ON_A_GPU", []) if metafunc.function is test_on_the_gpu else []
        metafunc.parametrize("case", [*metafunc.module.CASES, *more], ids=lambda case: case.name)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Results and gradients of `CASES`, computed after the file's functions `check_*` have passed."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    run_interpreted(CHILD, request.path, path)
    return torch.load(path)
