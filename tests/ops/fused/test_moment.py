"""The kernels of the moment of keys against plain torch: what a token adds, the sum, and the scaled key."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401

from deltazoo.ops import linear_attention

pytest.importorskip("triton")

from deltazoo.ops.fused import decayed_sum, moment, scaled_key, weighted_squares  # noqa: E402


@dataclass(frozen=True)
class Moment(Case):
    """What a preconditioned rule does before and after its moment, which may be zero, and all gradients."""

    shape: tuple[int, ...] = (2, 9, 3, 12)

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        step, k, log_scale = draw(*self.shape[:3]), draw(*self.shape), draw(self.shape[2], given=torch.float32)
        moment = draw(*self.shape, given=torch.float32).clamp_min(0)
        squares = weighted_squares(step.requires_grad_(), k.requires_grad_(), fused=fused)
        d_step, d_k = torch.autograd.grad(squares, [step, k], draw(*self.shape, given=torch.float32))
        inputs = [moment.requires_grad_(), log_scale.requires_grad_(), k]
        key = scaled_key(*inputs, fused=fused)
        gradients = torch.autograd.grad(key, inputs, draw(*self.shape))
        names = ("d_moment", "d_log_scale", "d_k_of_the_key")
        made = {"squares": squares.detach(), "d_step": d_step, "d_k": d_k, "key": key.detach()}
        return made | dict(zip(names, gradients, strict=True))


@dataclass(frozen=True)
class DecayedSum(Case):
    """The moment of PGDN's keys, a sum that decays, and all gradients; by the operator where it is not fused."""

    shape: tuple[int, ...] = (2, 70, 3, 12)
    decay: float = 1.0

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        x, d_y = draw(*self.shape).requires_grad_(), draw(*self.shape)
        log_decay = (-self.decay * draw(*self.shape[:3]).abs()).requires_grad_()
        if fused:
            y = decayed_sum(x, log_decay)
        else:
            ones = torch.ones_like(x[..., :1])
            y, _ = linear_attention(ones, ones, x, log_decay, backend="chunkwise")
        d_x, d_log_decay = torch.autograd.grad(y, [x, log_decay], d_y)
        return {"y": y.detach(), "d_x": d_x, "d_log_decay": d_log_decay}


CASES: list[Case] = [
    Moment("moment"),
    Moment("moment_of_many_rows", shape=(3, 150, 5, 7)),
    Moment("moment_half", dtype=HALF),
    *(DecayedSum(f"decayed_sum_{decay:g}", decay=decay) for decay in (0, 10)),
    DecayedSum("decayed_sum_of_one_channel", shape=(1, 64, 2, 1)),
    DecayedSum("decayed_sum_of_many_channels", shape=(1, 40, 1, 150)),
    DecayedSum("decayed_sum_of_long_rows", shape=(1, 300, 1, 24)),
]

MORE_ON_A_GPU: list[Case] = [
    DecayedSum("decayed_sum_0.1", decay=0.1),
    DecayedSum("decayed_sum_of_many_channels_and_heads", shape=(1, 40, 2, 150)),
    DecayedSum("decayed_sum_of_1000_tokens", shape=(1, 1000, 1, 24)),
]


def test_moments_that_do_not_fit() -> None:
    k, scale = torch.ones(2, 5, 3, 8, device="meta"), torch.ones(3, device="meta")
    with pytest.raises(ValueError, match=r"got \(2, 5\) and \(2, 5, 3, 8\)"):
        weighted_squares(k[..., 0, 0], k, fused=True)
    with pytest.raises(ValueError, match=r"got \(2, 5, 3, 8\), \(2,\), \(2, 5, 3, 8\)"):
        scaled_key(k, scale[:2], k, fused=True)
    with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
        scaled_key(k.double(), scale, k, fused=True)


def check_operators() -> None:
    x, gate, p = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3), torch.randn(3)
    opcheck(
        (moment._weighted_squares, gate, x),
        (moment._scaled_key, x.square(), p, x),
    )
