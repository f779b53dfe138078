"""The moment of PGDN and PKDA and the keys scaled by it, each step in one pass over memory, forward and backward.

    weighted_squares    x = sigmoid(step) k * k
    decayed_sum         y_t = exp(g_t) y_{t-1} + x_t
                        dx_t = dy_t + exp(g_{t+1}) dx_{t+1}        dg_t = exp(g_t) <dx_t, y_{t-1}>
    scaled_key          r = log(moment + 1e-6) - log_scale      f = 1.5^(-r / (1 + |r|))      key = f k

`step` and g are one number per token and head, `log_scale` one per head. The backward passes keep the inputs, the sum's
its result and g, and leave the gradient of `log_scale` per row, for torch to sum. Source: arXiv:2604.21100.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.device_math import logistic
from deltazoo.ops.fused.keys import keep_tile, key_constants, key_rows, load_tile, number_of_heads
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_operator
from deltazoo.ops.recompute import recomputable

SQUASH = 1.5
"""Largest factor of a channel of the write key; the smallest is its inverse. The kernels have it as a literal."""

_MOST_SUMMED_CHANNELS = 256
"""Largest K of `decayed_sum`: a program holds a whole head, since the gradient of the decay sums over its channels."""

_ELEMENTS = 8192
"""Elements that a program scans at once, of at most 64 tokens; more would spill registers."""


def weighted_squares(step: Tensor, k: Tensor, *, fused: bool | None = None) -> Tensor:
    """`sigmoid(step) k * k`, which a token adds to the second moment of its keys.

    Args:
        step: `[B, T, H]`.
        k: `[B, T, H, K]`.

    Returns:
        `[B, T, H, K]` float32 (float64 stays); the backward pass keeps only step and k.

    Raises:
        ValueError: shapes that do not fit each other for a kernel.
    """
    if not takes_kernel(fused, k, step, columns=k.shape[-1]):
        return recomputable(_squares_in_torch, step, k)
    if k.ndim != 4 or step.shape != k.shape[:3]:
        raise ValueError(f"expected step [B, T, H] and k [B, T, H, K], got {tuple(step.shape)} and {tuple(k.shape)}")
    return recomputable(_weighted_squares, step, k)


def _squares_in_torch(step: Tensor, k: Tensor) -> Tensor:
    return torch.sigmoid(at_least_float32(step))[..., None] * at_least_float32(k).square()


def takes_decayed_sum(fused: bool | None, x: Tensor) -> bool:
    """Whether `decayed_sum` computes the sum of x `[B, T, H, K]`, rather than linear attention with K = 1.

    The operator gets few long rows, since it works on their chunks side by side.
    """
    B, T, H, K = x.shape
    fits = K <= _MOST_SUMMED_CHANNELS and T <= 256 * B * H and x.dtype == torch.float32
    return fits and takes_kernel(fused, x)


def decayed_sum(x: Tensor, log_decay: Tensor) -> Tensor:
    """`y_t = exp(log_decay_t) y_{t-1} + x_t` over the tokens of each row, from zero, by a kernel.

    Args:
        x: `[B, T, H, K]` float32, K at most 256.
        log_decay: `[B, T, H]` float32, natural log.

    Returns:
        `[B, T, H, K]` float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or more channels.
        ValueError: tensors that do not fit each other, of another dtype, or on several devices.
    """
    takes_kernel(True, x, log_decay)
    if x.ndim != 4 or log_decay.shape != x.shape[:3] or {x.dtype, log_decay.dtype} != {torch.float32}:
        raise ValueError(
            f"expected x [B, T, H, K] and log_decay [B, T, H] in float32, got {x.dtype} {tuple(x.shape)} and "
            f"{log_decay.dtype} {tuple(log_decay.shape)}"
        )
    most = _MOST_SUMMED_CHANNELS
    if x.shape[-1] > most:
        raise NotImplementedError(f"the kernel takes heads of up to {most} channels, not {x.shape[-1]}")
    return recomputable(_decayed_sum, x, log_decay)


def scaled_key(moment: Tensor, log_scale: Tensor, k: Tensor, *, fused: bool | None = None) -> Tensor:
    """`1.5^(-r / (1 + |r|)) k` with `r = log(moment + 1e-6) - log_scale`, computed in float32 and rounded once.

    Args:
        moment: `[B, T, H, K]` float32, not negative.
        log_scale: `[H]`.
        k: `[B, T, H, K]`.

    Returns:
        `[B, T, H, K]` in k's dtype; the backward pass keeps only the inputs.

    Raises:
        ValueError: shapes that do not fit each other for a kernel.
    """
    if not takes_kernel(fused, k, moment, log_scale, columns=k.shape[-1]):
        return recomputable(_key_in_torch, moment, log_scale, k)
    if k.ndim != 4 or moment.shape != k.shape or log_scale.shape != k.shape[2:3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (moment, log_scale, k))
        raise ValueError(f"expected moment and k [B, T, H, K] and log_scale [H], got {shapes}")
    return recomputable(_scaled_key, moment, log_scale, k)


def _key_in_torch(moment: Tensor, log_scale: Tensor, k: Tensor) -> Tensor:
    r = torch.log(moment + 1e-6) - log_scale.to(moment.dtype)[:, None]
    return (torch.exp(-math.log(SQUASH) * r / (1 + r.abs())) * k).to(k.dtype)


@triton.jit(do_not_specialize=["R"])
def weighted_squares_forward_kernel(step, k, y, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                                    BD: tl.constexpr):  # fmt: skip
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = load_tile(k, rows, columns, mask, K)
    s, _, _ = logistic(tl.load(step + rows, mask=row_mask, other=0.0).to(tl.float32))
    keep_tile(y, s[:, None] * X * X, rows, columns, mask, K)


@triton.jit(do_not_specialize=["R"])
def weighted_squares_backward_kernel(step, k, d_y, d_step, d_k, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                                     BD: tl.constexpr):  # fmt: skip
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X, D = load_tile(k, rows, columns, mask, K), load_tile(d_y, rows, columns, mask, K)
    s, rest, _ = logistic(tl.load(step + rows, mask=row_mask, other=0.0).to(tl.float32))
    keep_tile(d_k, 2 * s[:, None] * X * D, rows, columns, mask, K)
    d_s = s * rest * tl.sum(X * X * D, axis=1)
    tl.store(d_step + rows, d_s.to(d_step.dtype.element_ty), mask=row_mask)


@triton.jit
def _factor(A, target):
    """The factor f, and its derivative by r."""
    log_1_5 = 0.4054651081081644
    r = tl.log(A + 1e-6) - target
    inverse = 1 / (1 + tl.abs(r))
    f = tl.exp(-log_1_5 * r * inverse)
    return f, -log_1_5 * f * inverse * inverse


@triton.jit(do_not_specialize=["R"])
def scaled_key_forward_kernel(moment, log_scale, k, y, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                              BD: tl.constexpr):  # fmt: skip
    rows, columns, _, mask = key_rows(R, K, BR, BD)
    A, X = load_tile(moment, rows, columns, mask, K), load_tile(k, rows, columns, mask, K)
    f, _ = _factor(A, number_of_heads(log_scale, rows, H))
    keep_tile(y, f * X, rows, columns, mask, K)


@triton.jit(do_not_specialize=["R"])
def scaled_key_backward_kernel(moment, log_scale, k, d_y, d_moment, d_k, terms, R, H: tl.constexpr, K: tl.constexpr,
                               BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """`terms [R]`: each row's part of the gradient of log_scale."""
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    A, X = load_tile(moment, rows, columns, mask, K), load_tile(k, rows, columns, mask, K)
    D = load_tile(d_y, rows, columns, mask, K)
    f, slope = _factor(A, number_of_heads(log_scale, rows, H))
    keep_tile(d_k, f * D, rows, columns, mask, K)
    d_r = D * X * slope
    keep_tile(d_moment, d_r / (A + 1e-6), rows, columns, mask, K)
    tl.store(terms + rows, -tl.sum(d_r, axis=1), mask=row_mask)


def _constants_of(k):
    return key_constants(k.shape, H=k.shape[-2])


def _squares_forward(step, k):
    y = torch.empty_like(k, dtype=torch.float32)
    launch(weighted_squares_forward_kernel, _constants_of(k), step, k, y)
    return y


def _squares_backward(step, k, d_y):
    d_step, d_k = torch.empty_like(step), torch.empty_like(k)
    launch(weighted_squares_backward_kernel, _constants_of(k), step, k, d_y, d_step, d_k)
    return d_step, d_k


def _scaled_forward(moment, log_scale, k):
    y = torch.empty_like(k)
    launch(scaled_key_forward_kernel, _constants_of(k), moment, log_scale, k, y)
    return y


def _scaled_backward(moment, log_scale, k, d_y):
    d_moment, d_k = torch.empty_like(moment), torch.empty_like(k)
    terms = moment.new_empty(k.shape[:-1], dtype=torch.float32)
    launch(scaled_key_backward_kernel, _constants_of(k), moment, log_scale, k, d_y, d_moment, d_k, terms)
    return d_moment, terms.flatten(0, -2).sum(0).to(log_scale.dtype), d_k


_weighted_squares = row_operator(
    "weighted_squares(Tensor step, Tensor k) -> Tensor",
    _squares_forward,
    _squares_backward,
    fake=lambda step, k: k.new_empty(k.shape, dtype=torch.float32),
)

_scaled_key = row_operator(
    "scaled_key(Tensor moment, Tensor log_scale, Tensor k) -> Tensor",
    _scaled_forward,
    _scaled_backward,
    fake=lambda moment, log_scale, k: k.new_empty(k.shape),
)


@triton.jit
def _then(decay, x, next_decay, next_x):
    """Two neighbouring pieces of the sum joined: the decay over both, and their sum."""
    return decay * next_decay, x * next_decay + next_x


@triton.jit(do_not_specialize=["T"])
def decayed_sum_forward_kernel(x, g, y, T, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """The sum of x; x and y `[B, T, H, K]`, g `[B, T, H]`; grid (B * H,)."""
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
    """The gradients, from the last token to the first; grid (B * H,)."""
    first = (tl.program_id(0) // H).to(tl.int64) * T * H + tl.program_id(0) % H
    rows, columns = tl.arange(0, BT), tl.arange(0, BK)
    begins = (rows == 0)[:, None]
    carried = tl.zeros([BK], tl.float32)
    for block in range(0, tl.cdiv(T, BT)):
        tokens = T - (block + 1) * BT + rows  # the first may be negative
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
def _sum_constants(B: int, T: int, H: int, K: int) -> Constants:
    channels = triton.next_power_of_2(K)
    return Constants(B * H, T=T, H=H, K=K, BT=min(64, _ELEMENTS // channels), BK=channels, num_warps=8)


def _sum_forward(x, g):
    y = torch.empty_like(x)
    launch(decayed_sum_forward_kernel, _sum_constants(*x.shape), x, g, y)
    return y


def _sum_backward(y, g, d_y):
    d_x, d_g = torch.empty_like(y), torch.empty_like(g)
    launch(decayed_sum_backward_kernel, _sum_constants(*y.shape), y, g, d_y, d_x, d_g)
    return d_x, d_g


_decayed_sum = row_operator(
    "decayed_sum(Tensor x, Tensor g) -> Tensor",
    _sum_forward,
    _sum_backward,
    backward_schema="decayed_sum_backward(Tensor y, Tensor g, Tensor d_y) -> (Tensor, Tensor)",
    save=lambda ctx, inputs, y: ctx.save_for_backward(y, inputs[1]),
    gradients=lambda backward, ctx, d_y: backward(*ctx.saved_tensors, d_y),
)
