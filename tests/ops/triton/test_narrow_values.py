"""Which form of the tail is right on this GPU for 16-bit inputs, decay per channel and V <= 64; see `NARROW_CHANNEL`.

`ops.api` refuses these calls, since the first form was wrong on an H200. A form that passes everything here, and as
fast as any other that does, is the one to ship; then the refusal can go.
"""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import DeltaRuleCase
from helpers import assert_within_reference, results_and_gradients

from deltazoo.ops import api, delta_rule

pytest.importorskip("triton")

from deltazoo.ops.triton import tiling  # noqa: E402

CANDIDATES = ("straight", "loop", "halves", "unpipelined")


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    tiling.tiles_for.cache_clear()
    monkeypatch.setattr(tiling, "NARROW_CHANNEL", request.param)
    monkeypatch.setattr(api, "_triton_obstacle", lambda *_: None)
    request.addfinalizer(tiling.tiles_for.cache_clear)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("log_decay", [-0.1, "mixed", "reset"], ids=str)
@pytest.mark.parametrize(("K", "V", "T"), [(64, 64, 150), (128, 64, 200), (96, 33, 100), (16, 16, 65), (256, 20, 64)])
def test_narrow_values(candidate: str, K: int, V: int, T: int, log_decay: float | str, dtype: torch.dtype) -> None:
    options = dict(decay="channel", log_decay=log_decay, beta=0.7, initial_state=True)
    case = DeltaRuleCase("narrow", B=2, T=T, K=K, V=V, groups=2, **options)  # type: ignore[arg-type]
    inputs = case.make(device="cuda", dtype=dtype)
    actual = results_and_gradients(delta_rule, inputs, backend="triton")
    exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
    plain = results_and_gradients(delta_rule, inputs, backend="chunkwise")
    assert_within_reference(actual, exact, plain, inputs, rounding=dtype, floor=4.0)
