"""Linear maps of one token, with the operations before and after them in a block, in one launch.

    y = f(norm(x) W^T)        norm: none, RMSNorm of the row, or RMSNorm of every head, from sums computed before
                              f: add a residual; SwiGLU of two halves; short convolution and SiLU of the first outputs

A step for one row reads every weight once, so a launch should take the time of reading W. A program loads its rows of W
before it waits for x (`launch_ahead`). Sums are in float32. The RMSNorm of a row is applied to the sum, since one pass
over x gives both: `norm(x) W^T = rsqrt(mean x^2 + eps) * ((x * w) W^T)`. `row_product` is for more rows.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.between_products import HeadNorm, head_scale
from deltazoo.ops.decoding.convolution import Convolution, convolve, load_windows
from deltazoo.ops.decoding.launch_ahead import launch_step, wait_for_inputs
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.triton.launch import Constants


@triton.jit(do_not_specialize=["eps"])
def token_product_kernel(
    x,  # [R, K]
    weight,  # [N, K], with GLU [2 N, K]: gate, then up
    norm_weight,  # [K] or None: no norm of the row
    squares,  # [R, HEADS, PARTS] or None
    bias,  # [N] or None
    residual,  # [R, N] or None
    q_taps,  # or None: no convolution
    k_taps,
    v_taps,
    window,
    y,  # [R, N]
    eps,
    N: tl.constexpr, K: tl.constexpr, GLU: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
    SILU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = weight.dtype.element_ty != tl.float32
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    column_mask = columns < N
    k = tl.arange(0, BK)

    # The kernel before writes neither weights nor windows, so they are loaded while it still runs.
    tile = columns[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(weight + tile, mask=column_mask[:, None] & (k < K)[None, :], other=0.0)
    if GLU:
        w_up = tl.load(weight + N * K + tile, mask=column_mask[:, None] & (k < K)[None, :], other=0.0)
    if norm_weight is not None:
        factor = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    if window is not None:
        older, older_taps, newest_tap = load_windows(
            q_taps, k_taps, v_taps, window, tl.program_id(1), columns, CQ, CK, CV, W, BW
        )
    wait_for_inputs(AHEAD)

    total = tl.zeros([BN], tl.float32)
    if GLU:
        total_up = tl.zeros([BN], tl.float32)
    square_sum = 0.0
    for start in tl.static_range(0, K, BK):
        channels = start + k
        inner = channels < K
        if start > 0:
            mask = column_mask[:, None] & inner[None, :]
            w = tl.load(weight + tile + start, mask=mask, other=0.0)
            if GLU:
                w_up = tl.load(weight + N * K + tile + start, mask=mask, other=0.0)
            if norm_weight is not None:
                factor = tl.load(norm_weight + channels, mask=inner, other=0.0).to(tl.float32)
        value = tl.load(x + tl.program_id(1) * K + channels, mask=inner, other=0.0).to(tl.float32)
        if norm_weight is not None:
            square_sum += tl.sum(value * value, axis=0)
            value *= factor
        if squares is not None:
            head = tl.program_id(1) * HEADS + channels // HEAD_DIM
            value *= head_scale(squares, head, inner, HEAD_DIM, PARTS, eps)
        total += tl.sum(w.to(tl.float32) * value[None, :], axis=1)
        if GLU:
            total_up += tl.sum(w_up.to(tl.float32) * value[None, :], axis=1)
    if norm_weight is not None:
        inverse = tl.rsqrt(square_sum / K + eps)
        total *= inverse
        if GLU:
            total_up *= inverse
    if bias is not None:
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    if GLU:
        total = total * sigmoid(total, HALF) * total_up
    if window is not None:
        total = convolve(total, older, older_taps, newest_tap, tl.program_id(1), columns, window, CQ + CK + CV, W, BW,
                         SILU, HALF)  # fmt: skip
    outputs = tl.program_id(1) * N + columns
    if residual is not None:
        total += tl.load(residual + outputs, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=column_mask)


class ProductTile(NamedTuple):
    """The part of a product that a program computes, and its warps."""

    outputs: int
    inner: int
    """Inner channels per block: all of them, loaded at once, if they fit."""
    warps: int


@lru_cache(maxsize=1024)
def choose_tile(K: int, itemsize: int, convolves: bool, silu: bool = True) -> ProductTile:
    """The tile of a product over K channels: at most 64 KiB of weights at once.

    A convolution takes so many registers that with 8 warps not all programs of a 374 M model would fit at once. Without
    SiLU it takes even more (217 a thread with 4 warps), so half of the weights are loaded at once.
    """
    inner = min(triton.next_power_of_2(K), 8192 // itemsize)
    if not silu:
        inner = max(1, inner // 2)
    return ProductTile(8, inner, warps=4 if convolves and inner * itemsize <= 2048 else 8)


def token_product(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    head_norm: HeadNorm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    convolution: Convolution | None = None,
    glu: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear map of one token with its neighbours in a block. It has no gradients.

    Every row reads the weight anew, so this is fast for one row only; results are right for any number.

    Args:
        x: `[R, K]`; contiguous, as all tensors here.
        weight: `[N, K]` float32, bfloat16 or float16; with `glu` `[2 N, K]`.
        norm_weight: `[K]`, weight of an RMSNorm of x before the map.
        norm_eps: epsilon of that norm.
        head_norm: RMSNorm of the heads of x instead.
        bias: `[N]`, without `glu`.
        residual: `[R, N]`, added to the result.
        convolution: short convolutions of the first outputs.
        glu: whether the result is `silu(gate) * up` of the two halves of the map.
        dtype: dtype of the result; the weight's unless given.

    Returns:
        `[R, N]`.
    """
    R, K = x.shape
    N = weight.shape[0] // (2 if glu else 1)
    y = x.new_empty(R, N, dtype=dtype or weight.dtype)
    squares, head_dim, eps = (None, 1, norm_eps) if head_norm is None else head_norm
    q_taps, k_taps, v_taps, window = (None, None, None, None)
    channels, width, silu = (0, 0, 0), 2, True
    if convolution is not None:
        (q_taps, k_taps, v_taps), window, silu = convolution
        channels, width = (len(q_taps), len(k_taps), len(v_taps)), window.shape[-1] + 1
    heads = (1, 1) if squares is None else squares.shape[1:]
    tile = choose_tile(K, weight.element_size(), convolution is not None, silu)
    launch_step(
        token_product_kernel, _constants, (R, N, K, glu, *heads, head_dim, eps, channels, width, silu, tile), x, weight,
        norm_weight, squares, bias, residual, q_taps, k_taps, v_taps, window, y,
    )  # fmt: skip
    return y


def _constants(
    R: int, N: int, K: int, glu: bool, heads: int, parts: int, head_dim: int, eps: float,
    channels: tuple[int, int, int], width: int, silu: bool, tile: ProductTile,
) -> Constants:  # fmt: skip
    CQ, CK, CV = channels
    return Constants(
        -(-N // tile.outputs), R, eps=eps, N=N, K=K, GLU=glu, HEADS=heads, HEAD_DIM=head_dim, PARTS=parts, CQ=CQ,
        CK=CK, CV=CV, W=width, BW=triton.next_power_of_2(width - 1), SILU=silu, BN=tile.outputs, BK=tile.inner,
        num_warps=tile.warps,
    )  # fmt: skip
