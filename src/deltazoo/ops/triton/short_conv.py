"""Short causal convolution, SiLU and, where heads are given, their L2 norm: one pass over memory each way.

    z_t = sum_i w_i x_{t-i}      s = z * sigmoid(z)      y = s  or, per head,  s / sqrt(|s|^2 + eps)

Tokens of all rows lie one after another; a row, or a packed sequence, is a stretch `[start, stop)` of them. Inputs from
before a stretch come from its state. The backward pass keeps nothing but the inputs: a program that owns tokens t works
out `dz` at t .. t + W - 1 again, since `dx_t = sum_j w_j dz_{t+j}`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["short_conv"]

_CHANNELS = 64
"""Channels of one program, where no head says how many belong together."""


@triton.jit
def _stretch(rows, sequence, cu_seqlens, T, M, PACKED: tl.constexpr):
    """Which stretch each token lies in, its first token and its end (int64); tokens past the last are in none."""
    if PACKED:
        inside = rows < M
        n = tl.load(sequence + rows, mask=inside, other=0)
        start = tl.load(cu_seqlens + n, mask=inside, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens + n + 1, mask=inside, other=0).to(tl.int64)
    else:
        n = rows // T
        start = n * T
        stop = tl.minimum(start + T, M)
    return n, start, stop


@triton.jit
def _input(x, past, rows, n, start, stop, columns, column_mask, C, W: tl.constexpr, PAST: tl.constexpr):
    """Inputs of the tokens `rows` in fp32; from the state before the start, zero past the end."""
    mask = ((rows >= start) & (rows < stop))[:, None] & column_mask[None, :]
    value = tl.load(x + rows[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if PAST:
        place = rows - start + (W - 1)
        mask = ((rows < start) & (place >= 0) & (start < stop))[:, None] & column_mask[None, :]
        offsets = (n[:, None] * C + columns[None, :]) * (W - 1) + place[:, None]
        value += tl.load(past + offsets, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _pre_activation(x, weight, past, rows, n, start, stop, columns, column_mask, C, W: tl.constexpr,
                    PAST: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    z = tl.zeros([BT, BC], tl.float32)
    for i in tl.static_range(W):
        tap = tl.load(weight + columns * W + (W - 1 - i), mask=column_mask, other=0.0).to(tl.float32)
        z += _input(x, past, rows - i, n, start, stop, columns, column_mask, C, W, PAST) * tap[None, :]
    return z


@triton.jit(do_not_specialize=["T", "M", "eps"])
def _forward_kernel(
    x,  # [M, C]
    weight,  # [C, W]
    past,  # [N, C, W - 1] or None
    sequence,  # [M] or None
    cu_seqlens,  # [N + 1] or None
    y,  # [M, C]
    T,
    M,
    C,
    eps,
    W: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a program: those of a head where NORM
    NORM: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    within = tl.arange(0, BC)
    columns = tl.program_id(1) * WIDTH + within
    column_mask = (within < WIDTH) & (columns < C)
    n, start, stop = _stretch(rows, sequence, cu_seqlens, T, M, sequence is not None)
    z = _pre_activation(x, weight, past, rows, n, start, stop, columns, column_mask, C, W, past is not None, BT, BC)
    s = z * tl.sigmoid(z)
    if NORM:
        s *= tl.rsqrt(tl.sum(s * s, axis=1) + eps)[:, None]
    mask = (rows < stop)[:, None] & column_mask[None, :]
    tl.store(y + rows[:, None] * C + columns[None, :], s.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "M", "eps"])
def _backward_kernel(
    x,
    weight,
    past,
    sequence,
    cu_seqlens,
    d_y,  # [M, C]
    d_x,  # [M, C]
    d_weight,  # [programs along the tokens, C, W]: parts of a sum
    T,
    M,
    C,
    eps,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    within = tl.arange(0, BC)
    columns = tl.program_id(1) * WIDTH + within
    column_mask = (within < WIDTH) & (columns < C)
    PAST: tl.constexpr = past is not None
    n, start, stop = _stretch(rows, sequence, cu_seqlens, T, M, sequence is not None)
    total = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        z = _pre_activation(x, weight, past, rows + j, n, start, stop, columns, column_mask, C, W, PAST, BT, BC)
        mask = (rows + j < stop)[:, None] & column_mask[None, :]
        d = tl.load(d_y + (rows + j)[:, None] * C + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.sigmoid(z)
        if NORM:
            s = z * gate
            inverse = tl.rsqrt(tl.sum(s * s, axis=1) + eps)[:, None]
            d = inverse * (d - s * (inverse * inverse * tl.sum(d * s, axis=1)[:, None]))
        d *= gate * (1 + z * (1 - gate))
        tap = tl.load(weight + columns * W + (W - 1 - j), mask=column_mask, other=0.0).to(tl.float32)
        total += d * tap[None, :]
        if j == 0:
            parts = d_weight + (tl.program_id(0).to(tl.int64) * C + columns) * W
            for i in tl.static_range(W):
                part = tl.sum(d * _input(x, past, rows - i, n, start, stop, columns, column_mask, C, W, PAST), axis=0)
                tl.store(parts + (W - 1 - i), part, mask=column_mask)
    mask = (rows < stop)[:, None] & column_mask[None, :]
    tl.store(d_x + rows[:, None] * C + columns[None, :], total.to(d_x.dtype.element_ty), mask=mask)


def _launch_options(x: Tensor, weight: Tensor, head_dim: int) -> tuple[tuple[int, int], dict[str, int]]:
    width = head_dim or min(_CHANNELS, x.shape[2])
    block = max(16, 1 << (width - 1).bit_length())
    # Eight elements per thread: with sixteen the backward pass spills (tests/ops/triton/test_fused_compile.py).
    block_tokens = max(4, min(16, 2048 // block))
    warps = max(1, min(8, block * block_tokens // 256))
    tokens = x.shape[0] * x.shape[1]
    grid = (max(1, -(-tokens // block_tokens)), -(-x.shape[2] // width))
    constants = {"W": weight.shape[-1], "WIDTH": width, "NORM": int(head_dim > 0), "BT": block_tokens, "BC": block}
    return grid, {**constants, "num_warps": warps}


def _forward(x, weight, past, sequence, cu_seqlens, head_dim, eps):  # type: ignore[no-untyped-def]
    x, weight = x.contiguous(), weight.contiguous()
    past = None if past is None else past.contiguous()
    y = torch.empty_like(x)
    grid, options = _launch_options(x, weight, head_dim)
    B, T, C = x.shape
    with torch.cuda.device_of(x):
        _forward_kernel[grid](x, weight, past, sequence, cu_seqlens, y, T, B * T, C, eps, **options)
    return y


def _backward(x, weight, past, sequence, cu_seqlens, head_dim, eps, d_y):  # type: ignore[no-untyped-def]
    x, weight, d_y = x.contiguous(), weight.contiguous(), d_y.contiguous()
    past = None if past is None else past.contiguous()
    d_x = torch.empty_like(x)
    grid, options = _launch_options(x, weight, head_dim)
    B, T, C = x.shape
    parts = x.new_empty(grid[0], *weight.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _backward_kernel[grid](x, weight, past, sequence, cu_seqlens, d_y, d_x, parts, T, B * T, C, eps, **options)
    return d_x, parts.sum(0).to(weight.dtype)


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? past, Tensor? sequence, Tensor? cu_seqlens, int head_dim, float eps"
_library = torch.library.Library("deltazoo", "FRAGMENT")
_library.define(f"short_conv({_ARGUMENTS}) -> Tensor")
_library.define(f"short_conv_backward({_ARGUMENTS}, Tensor d_y) -> (Tensor, Tensor)")
_library.impl("short_conv", _forward, "CompositeExplicitAutograd")
_library.impl("short_conv_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("deltazoo::short_conv", lib=_library)
def _(x, weight, past, sequence, cu_seqlens, head_dim, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.register_fake("deltazoo::short_conv_backward", lib=_library)
def _(x, weight, past, sequence, cu_seqlens, head_dim, eps, d_y):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, past, sequence, cu_seqlens, ctx.head_dim, ctx.eps = inputs
    ctx.save_for_backward(x, weight, past, sequence, cu_seqlens)


def _autograd(ctx, d_y):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    d_x, d_weight = torch.ops.deltazoo.short_conv_backward.default(*saved, ctx.head_dim, ctx.eps, d_y)
    return d_x, d_weight, None, None, None, None, None


torch.library.register_autograd("deltazoo::short_conv", _autograd, setup_context=_setup_context, lib=_library)


def short_conv(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_dim: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """See `deltazoo.ops.fused.fused_short_conv`."""
    return torch.ops.deltazoo.short_conv.default(x, weight, past, sequence, cu_seqlens, head_dim, eps)
