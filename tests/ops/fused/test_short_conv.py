"""The kernels of the short convolution against plain torch: whole sequences, and one token at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from fused_cases import HALF, Case, Results, test_interpreted, test_on_the_gpu  # noqa: F401
from torch import Tensor

from deltazoo.layers import WHOLE_ROWS, ShortConvolution, describe_sequences, l2_normalize

pytest.importorskip("triton")

from deltazoo.ops.fused import short_conv_kernels, short_convolution, short_convolution_step  # noqa: E402


@dataclass(frozen=True)
class Convolution(Case):
    """One call of the convolution, with its gradients and its final state.

    With so few programs the runs of tokens are as short as they get, unless `long_runs`.
    """

    B: int = 2
    T: int = 37
    channels: int = 24
    taps: int = 4
    activation: str = "silu"
    unit_heads: int = 0
    lengths: tuple[int, ...] = ()
    past: bool = False
    long_runs: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        T = sum(self.lengths) or self.T
        N = len(self.lengths) or self.B
        draw = self.drawing(device, dtype)
        module = ShortConvolution(self.channels, self.taps, self.activation, unit_heads=self.unit_heads, fused=fused)
        module.weight = torch.nn.Parameter(draw(self.channels, 1, self.taps))
        x = draw(1 if self.lengths else self.B, T, self.channels).requires_grad_()
        state = draw(N, self.channels, self.taps - 1) if self.past else None
        sequences = WHOLE_ROWS
        if self.lengths:
            bounds = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0)], dtype=torch.int32, device=device)
            sequences = describe_sequences(1, T, cu_seqlens=bounds)
        enough = 1 if self.long_runs else short_conv_kernels._ENOUGH_PROGRAMS
        with mock.patch.object(short_conv_kernels, "_ENOUGH_PROGRAMS", enough):
            y, window = module(x, state, sequences)
            d_x, d_weight = torch.autograd.grad([y, window], [x, module.weight], [draw(*y.shape), draw(*window.shape)])
        return {"y": y.detach(), "window": window.detach(), "d_x": d_x, "d_weight": d_weight}


@dataclass(frozen=True)
class TokenStep(Case):
    """One token of three convolutions at once, against the three one by one."""

    channels: tuple[int, int, int] = (24, 24, 40)
    head: tuple[int, int] = (8, 8)
    taps: int = 4
    activation: str = "silu"
    inplace: bool = False
    side_by_side: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        convolutions = []
        for channels, head in zip(self.channels, (*self.head, 0), strict=True):
            convolutions.append(ShortConvolution(channels, self.taps, self.activation, unit_heads=head, fused=fused))
            convolutions[-1].weight = torch.nn.Parameter(draw(channels, 1, self.taps))
        x, state = draw(3, 1, sum(self.channels)), draw(3, sum(self.channels), self.taps - 1)
        inputs = x.split(self.channels, dim=-1)
        if fused:
            inputs = inputs if self.side_by_side else tuple(part.contiguous() for part in inputs)
            weights = tuple(convolution.weight for convolution in convolutions)
            options = {"activation": self.activation, "head_dims": self.head, "inplace": self.inplace, "fused": True}
            with torch.no_grad():
                y, window = short_convolution_step(inputs, weights, state, **options)
            assert (window is state) == self.inplace
        else:
            pasts = state.split(self.channels, dim=1)
            y, windows = zip(*(f(x, past) for f, x, past in zip(convolutions, inputs, pasts, strict=True)), strict=True)
            window = torch.cat(windows, dim=1)
        return {"y": torch.cat(list(y), dim=-1).detach(), "window": window}


CASES: list[Case] = [
    Convolution("plain"),
    Convolution("one_tap", taps=1),
    Convolution("two_taps_past", taps=2, past=True),
    Convolution("past", past=True),
    Convolution("shorter_than_the_taps", T=2, past=True),
    Convolution("one_token", T=1, past=True),
    Convolution("unit_heads", unit_heads=8, past=True),
    Convolution("odd_heads", channels=36, unit_heads=12),
    Convolution("wide", channels=150, T=5),
    Convolution("packed", lengths=(5, 0, 1, 17, 2), unit_heads=8),
    Convolution("packed_past", lengths=(5, 0, 1, 17, 2), past=True),
    Convolution("five_taps", taps=5, past=True),
    Convolution("long_runs", T=130, unit_heads=8, past=True, long_runs=True),
    Convolution("a_run_and_a_token", T=65, B=3, long_runs=True),
    Convolution("long_runs_packed", lengths=(70, 0, 1, 3, 62, 2), unit_heads=8, past=True, long_runs=True),
    Convolution("half", dtype=HALF, unit_heads=8, past=True),
    Convolution("bare_sum", activation="identity", past=True),
    Convolution("bare_sum_unit_heads", activation="identity", unit_heads=8, lengths=(5, 0, 1, 17, 2)),
    Convolution("bare_sum_half", activation="identity", dtype=HALF, long_runs=True, T=65),
    TokenStep("step"),
    TokenStep("step_in_place", inplace=True, side_by_side=True),
    TokenStep("step_bare", head=(0, 0)),
    TokenStep("step_queries_normalised", head=(8, 0), channels=(16, 24, 12)),
    TokenStep("step_keys_normalised", head=(0, 8), channels=(20, 24, 12), inplace=True),
    TokenStep("step_odd_heads", head=(12, 12), channels=(36, 36, 50), side_by_side=True),
    TokenStep("step_two_taps", taps=2, inplace=True),
    TokenStep("step_one_tap", taps=1),
    TokenStep("step_wide", head=(0, 0), channels=(150, 130, 300), inplace=True),
    TokenStep("step_half", dtype=HALF, inplace=True, side_by_side=True),
    TokenStep("step_bare_sum", activation="identity", head=(0, 0), inplace=True),
    TokenStep("step_bare_sum_unit_heads", activation="identity"),
]


def test_a_state_that_needs_a_gradient() -> None:
    x, state = torch.empty(1, 3, 4, device="meta"), torch.empty(1, 4, 3, device="meta", requires_grad=True)
    with pytest.raises(ValueError, match="gives no gradient to its state"):
        short_convolution(x, torch.empty(4, 4, device="meta"), state, fused=True)


def test_a_window_that_cannot_be_written_is_replaced() -> None:
    inputs, weights = (torch.empty(2, 1, 8, device="meta"),) * 3, (torch.empty(8, 4, device="meta"),) * 3
    for window in (torch.empty(2, 24, 3, device="meta").half(), torch.empty(2, 3, 24, device="meta").mT):
        _, after = short_convolution_step(inputs, weights, window, inplace=True, fused=True)
        assert after is not window and after.dtype == torch.float32 and after.is_contiguous()
    with pytest.raises(ValueError, match="4 taps need a window of 3 inputs before the token, got 2"):
        short_convolution_step(inputs, weights, torch.empty(2, 24, 2, device="meta"), fused=True)


def test_heads_of_two_sizes() -> None:
    inputs, weights = (torch.empty(2, 1, 8, device="meta"),) * 3, (torch.empty(8, 4, device="meta"),) * 3
    with pytest.raises(ValueError, match=r"one size, got head_dims=\(4, 8\)"):
        short_convolution_step(inputs, weights, torch.empty(2, 24, 3, device="meta"), head_dims=(4, 8), fused=True)


def test_a_convolution_in_float64() -> None:
    with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
        short_convolution(torch.empty(1, 3, 4, dtype=torch.float64, device="meta"), torch.empty(4, 2), fused=True)


def test_tensors_on_two_devices() -> None:
    x, weights = torch.empty(2, 1, 8, device="meta"), (torch.empty(8, 4, device="meta"),) * 3
    with pytest.raises(ValueError, match="of one device, got meta and cpu"):
        short_convolution(x, torch.empty(8, 4), fused=True)
    with pytest.raises(ValueError, match="of one device, got meta and cpu"):
        short_convolution_step((x, x, x), weights, torch.empty(2, 24, 3), fused=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on a CPU")
def test_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="run on NVIDIA GPUs, not on cpu: leave fused_kernels off"):
        ShortConvolution(4, fused=True)(torch.randn(1, 3, 4))


@pytest.mark.gpu
def test_repeated_calls_give_the_same_bits() -> None:
    case = Convolution("large", T=1000, channels=256, unit_heads=64)
    first, *others = (case.run("cuda", fused=True) for _ in range(5))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_compiles_without_a_graph_break(inplace: bool) -> None:
    """On meta tensors: shapes and dtypes, no kernel."""

    def run(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], window: Tensor) -> tuple[Tensor, Tensor]:
        options = {"head_dims": (8, 8), "inplace": inplace, "fused": True}
        outputs, window = short_convolution_step(inputs, weights, window, **options)
        return torch.cat(tuple(outputs), dim=-1), window

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    arguments = (empty(2, 1, 16),) * 3, (empty(16, 4),) * 3, empty(2, 48, 3)
    y, window = torch.compile(run, backend="aot_eager", fullgraph=True)(*arguments)
    assert (y.shape, window.shape) == ((2, 1, 48), (2, 48, 3)) and y.dtype == window.dtype == torch.bfloat16


def test_unit_heads_in_plain_torch() -> None:
    module, x = ShortConvolution(12, unit_heads=4), torch.randn(2, 9, 12)
    torch.nn.init.normal_(module.weight)
    bare = ShortConvolution(12)
    bare.weight = module.weight
    torch.testing.assert_close(module(x)[0], l2_normalize(bare(x)[0].unflatten(2, (3, 4))).flatten(2))
