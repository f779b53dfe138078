"""Memory that a training call takes at its peak beside its inputs, counted on tensors without data."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from ops.triton.launches import launched_by, routed  # noqa: E402

from deltazoo.ops import operator
from deltazoo.ops.autograd_modes import scanning_again  # noqa: E402
from deltazoo.ops.call import RuleCall  # noqa: E402
from deltazoo.ops.triton.delta_rule import triton_delta_rule  # noqa: E402
from deltazoo.ops.triton.gluon import MISSING  # noqa: E402
from deltazoo.ops.triton.plan import Card  # noqa: E402

B, T, H, D = 8, 4096, 16, 128
UNIT = 2 * B * T * H * D
"""Bytes of v, 128 MiB."""


class Allocations(TorchDispatchMode):
    """Counts the memory of the tensors that are made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.references: dict[int, StorageWeakRef] = {}
        self.peak = 0
        """The most bytes at once."""

    def now(self) -> int:
        """Bytes of all tensors that are there."""
        self.references = {pointer: x for pointer, x in self.references.items() if not x.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(pointer).nbytes() for pointer in self.references)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, Tensor):
                reference = StorageWeakRef(x.untyped_storage())
                self.references[reference.cdata] = reference
        self.peak = max(self.peak, self.now())
        return results


def peak_and_kept(
    decay: str, gluon: bool, keep: bool, monkeypatch: pytest.MonkeyPatch, key_heads: int = H,
    gates: torch.dtype = torch.float32, strict: bool | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[float, float]:  # fmt: skip
    """Of forward and backward at 8 x 4096 tokens with 16 heads of 128, by autograd, in units of v in bfloat16.

    The most at once, and what there is between both besides the output.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    q, k = (empty(B, T, key_heads, D, dtype=dtype) for _ in range(2))
    v, beta = empty(B, T, H, D, dtype=dtype), empty(B, T, H)
    shape = {"none": None, "scalar": (B, T, H), "channel": (B, T, H, D)}[decay]
    log_decay = None if shape is None else empty(*shape, dtype=gates)
    d_output, allocations = torch.empty_like(v), Allocations()
    with monkeypatch.context() as patch, launched_by(lambda *_: None), routed(Card(gluon=gluon)), allocations:
        patch.setattr(operator, "_dispatching", lambda: False)  # the counting mode is none that sees the operator
        with nullcontext() if keep else scanning_again():
            output = triton_delta_rule(RuleCall(q, k, v, beta, log_decay, D**-0.5, None, None, strict))[0]
            kept = allocations.now() - UNIT
        inputs = [x for x in (q, k, v, beta, log_decay) if x is not None]
        gradients = torch.autograd.grad(output, inputs, d_output)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    return allocations.peak / UNIT, kept / UNIT


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "scanned_again"])
@pytest.mark.parametrize(
    ("decay", "gluon", "units"),
    [
        # Output 1, A and P 1, U 1, states 2, Z and then dv 1, q and keys with decay 3. In the memory of two of these
        # lie the gradients of the states, then dq and dk. A, P and the third are gone before d_log_decay (2) comes.
        ("channel", True, 9.11),
        # The same, with d_states 2 and d_log_decay 2 apart, and dv in the memory of the third.
        ("channel", False, 12.14),
        # Output 1, A and P 1, U and then dv 1, states and then dq and dk 2.
        ("scalar", True, 5.11),
        ("none", True, 5.08),
        # Output 1, U 1, states 2, Z 1, d_states 2, dq, dk and dv 3.
        ("scalar", False, 10.06),
        ("none", False, 10.03),
    ],
)
def test_peak(decay: str, gluon: bool, units: float, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gluon and MISSING is not None:
        pytest.skip(MISSING)
    assert peak_and_kept(decay, gluon, keep, monkeypatch)[0] == pytest.approx(units, abs=0.006)


def test_peak_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel that makes the gradients in two launches one scratch is there at a time: 0.125 less than both."""
    peak, _ = peak_and_kept("channel", False, True, monkeypatch, dtype=torch.float32)
    assert peak == pytest.approx(24.078, abs=0.006)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("changes", "units"), [(dict(gates=torch.bfloat16), 9.11), (dict(key_heads=4), 13.06)], ids=str
)
def test_peak_where_gradients_are_changed_at_last(
    changes: dict[str, Any], units: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into other dtypes, or to sums over the heads that share keys, with dq and dk in float32 before (4)."""
    assert peak_and_kept("channel", True, True, monkeypatch, **changes)[0] == pytest.approx(units, abs=0.006)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("decay", ["none", "scalar"])
def test_a_call_without_large_gains_keeps_nothing_and_runs_again(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak there is one output more. By the gain A and P are kept."""
    peak, kept = peak_and_kept(decay, True, False, monkeypatch, strict=False)
    vectors = 2 / 128 * (1 + (decay == "scalar"))  # beta, and the log-decay, in float32
    assert kept == 0 and peak == pytest.approx(6 + 8 / 128 + vectors, abs=0.001)  # outputs, A and P, U, states; final
    assert peak_and_kept(decay, True, True, monkeypatch, strict=False)[1] > 4
    assert peak_and_kept(decay, True, False, monkeypatch)[1] == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("strict", [None, False])
def test_with_a_decay_per_channel_only_inputs_are_kept(
    gluon: bool, strict: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gluon and MISSING is not None:
        pytest.skip(MISSING)
    assert peak_and_kept("channel", gluon, False, monkeypatch, strict=strict)[1] == 0
    assert peak_and_kept("channel", gluon, True, monkeypatch, strict=strict)[1] > 4
