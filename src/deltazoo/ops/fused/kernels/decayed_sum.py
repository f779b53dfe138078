"""A sum over tokens that decays, forward and backward, each in one pass over memory: the moment of PGDN and PKDA.

    y_t = exp(g_t) y_{t-1} + x_t        dx_t = dy_t + exp(g_{t+1}) dx_{t+1}        dg_t = exp(g_t) <dx_t, y_{t-1}>

One program walks through the tokens of one head of a row, BT at a time, with a number per channel.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["decayed_sum"]

_ELEMENTS = 8192
"""That a program scans at once, of at most 64 tokens: more would be spilled."""


@triton.jit
def _then(decay, x, next_decay, next_x):
    """Two neighbouring pieces of the sum as one: the decay over it, and what it adds."""
    return decay * next_decay, x * next_decay + next_x


@triton.jit(do_not_specialize=["T"])
def decayed_sum_forward_kernel(x, g, y, T, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """x and y `[B, T, H, K]`, g `[B, T, H]`; grid (B * H,)."""
    first = (tl.program_id(0) // H).to(tl.int64) * T * H + tl.program_id(0) % H
    rows, columns = tl.arange(0, BT), tl.arange(0, BK)
    last = (rows == BT - 1)[:, None]
    carried = tl.zeros([BK], tl.float32)
    for start in range(0, T, BT):
        tokens = start + rows
        at = first + tokens * H
        mask = (tokens < T)[:, None] & (columns < K)[None, :]
        decay = tl.exp(tl.load(g + at, mask=tokens < T, other=0.0))[:, None] + tl.zeros([BT, BK], tl.float32)
        added = tl.load(x + at[:, None] * K + columns[None, :], mask=mask, other=0.0)
        decay, added = tl.associative_scan((decay, added), 0, _then)
        total = decay * carried[None, :] + added
        tl.store(y + at[:, None] * K + columns[None, :], total, mask=mask)
        carried = tl.sum(tl.where(last, total, 0.0), axis=0)


@triton.jit(do_not_specialize=["T"])
def decayed_sum_backward_kernel(y, g, d_y, d_x, d_g, T, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                                BK: tl.constexpr):  # fmt: skip
    """From the last token to the first; grid (B * H,)."""
    first = (tl.program_id(0) // H).to(tl.int64) * T * H + tl.program_id(0) % H
    rows, columns = tl.arange(0, BT), tl.arange(0, BK)
    begins = (rows == 0)[:, None]
    carried = tl.zeros([BK], tl.float32)
    for block in range(0, tl.cdiv(T, BT)):
        tokens = T - (block + 1) * BT + rows  # the first ones may be negative
        at = first + tokens * H
        inside = tokens >= 0
        mask = inside[:, None] & (columns < K)[None, :]
        channels = at[:, None] * K + columns[None, :]
        after = tl.load(g + at + H, mask=inside & (tokens + 1 < T), other=float("-inf"))
        decay = tl.exp(after)[:, None] + tl.zeros([BT, BK], tl.float32)
        added = tl.load(d_y + channels, mask=mask, other=0.0)
        decay, added = tl.associative_scan((decay, added), 0, _then, reverse=True)
        total = decay * carried[None, :] + added
        tl.store(d_x + channels, total, mask=mask)
        before = tl.load(y + channels - H * K, mask=mask & (tokens > 0)[:, None], other=0.0)
        own = tl.exp(tl.load(g + at, mask=inside, other=0.0))
        tl.store(d_g + at, own * tl.sum(total * before, axis=1), mask=inside)
        carried = tl.sum(tl.where(begins, total, 0.0), axis=0)


@lru_cache(maxsize=1024)
def _constants(B: int, T: int, H: int, K: int) -> Constants:
    channels = triton.next_power_of_2(K)
    return Constants(B * H, T=T, H=H, K=K, BT=min(64, _ELEMENTS // channels), BK=channels, num_warps=8)


def _forward(x, g):
    x, g = x.contiguous(), g.contiguous()
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        launch(decayed_sum_forward_kernel, _constants(*x.shape), x, g, y)
    return y


def _backward(y, g, d_y):
    y, g, d_y = y.contiguous(), g.contiguous(), d_y.contiguous()
    d_x, d_g = torch.empty_like(y), torch.empty_like(g)
    with torch.cuda.device_of(y):
        launch(decayed_sum_backward_kernel, _constants(*y.shape), y, g, d_y, d_x, d_g)
    return d_x, d_g


def _save(ctx, inputs, y):
    ctx.save_for_backward(y, inputs[1])


def _gradients(backward, ctx, d_y):
    return backward(*ctx.saved_tensors, d_y)


decayed_sum = DifferentiableOperator(
    "decayed_sum(Tensor x, Tensor g) -> Tensor",
    _forward,
    fake=lambda x, g: x.new_empty(x.shape),
    backward=Operator(
        "decayed_sum_backward(Tensor y, Tensor g, Tensor d_y) -> (Tensor, Tensor)",
        _backward,
        fake=lambda y, g, d_y: (y.new_empty(y.shape), g.new_empty(g.shape)),
    ),
    save=_save,
    gradients=_gradients,
    refusal=REFUSAL,
)
"""`decayed_sum(x, g)`, see `deltazoo.ops.fused.fused_decayed_sum`."""
