"""Linear maps of one token per row, with what stands before and after them in a block of a model: one launch.

    y = f(norm(x) W^T)        norm: none, RMSNorm of the row, or RMSNorm of every head with sums made before
                              f: add a residual; SwiGLU of two halves; short convolution and SiLU of the first outputs

A decoding step reads every weight once, so a launch should take the time of reading W. The kernel for one row loads its
rows of W before it waits for x (see `launches_ahead`). The kernel for a few rows multiplies on the tensor cores, block
by block along the inner axis. Both sum in float32. The RMSNorm of a row is applied to the sum, because one pass over x
gives both: `norm(x) W^T = rsqrt(mean x^2 + eps) * ((x * w) W^T)`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.fused.kernels.launch_ahead import launches_ahead, prefetch_rows, wait_for_inputs
from deltazoo.ops.fused.kernels.sigmoid import sigmoid
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["Convolution", "HeadNorm", "Tile", "choose_tile", "token_product"]

class HeadNorm(NamedTuple):
    """RMSNorm of the heads of x, whose weight has been applied: only the sums of squares are missing."""

    squares: Tensor
    """`[R, heads, parts]` float32: partial sums over each head of the squares to be averaged."""
    head_dim: int
    eps: float


class Convolution(NamedTuple):
    """Short convolutions of the first outputs, and SiLU."""

    taps: tuple[Tensor, Tensor, Tensor]
    """Of queries, keys and values, `[C_i, W]`, W at least 2; contiguous."""
    window: Tensor
    """`[R, C, W - 1]`: the maps' outputs before this token, oldest first, C the sum of the C_i. Advanced in place."""


@triton.jit
def _finish(
    total,  # [BM, BN] float32
    rows,
    columns,
    row_mask,
    residual,
    y,
    N: tl.constexpr,
):
    """Add the residual and store."""
    mask = row_mask[:, None] & (columns < N)[None, :]
    offsets = rows[:, None] * N + columns[None, :]
    if residual is not None:
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _older_inputs(window, rows, columns, row_mask, C: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """The windows of a tile of outputs, `[BM, BN, BW]`, oldest first."""
    slots = tl.arange(0, BW)
    mask = row_mask[:, None, None] & (columns < C)[None, :, None] & (slots < W - 1)[None, None, :]
    offsets = (rows[:, None, None] * C + columns[None, :, None]) * (W - 1) + slots[None, None, :]
    return tl.load(window + offsets, mask=mask, other=0.0)


@triton.jit
def _taps(q_taps, k_taps, v_taps, columns, slots, mask, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
          W: tl.constexpr):  # fmt: skip
    """Taps of a tile of outputs, in float32; zeros beyond the channels that are convolved."""
    of_q = columns < CQ
    of_v = (columns >= CQ + CK) & (columns < CQ + CK + CV)
    of_k = (columns >= CQ) & (columns < CQ + CK)
    taps = tl.load(q_taps + columns * W + slots, mask=mask & of_q, other=0.0)
    taps += tl.load(k_taps + (columns - CQ) * W + slots, mask=mask & of_k, other=0.0)
    taps += tl.load(v_taps + (columns - CQ - CK) * W + slots, mask=mask & of_v, other=0.0)
    return taps.to(tl.float32)


@triton.jit
def _convolve(
    total,  # [BM, BN] float32
    older,  # [BM, BN, BW]
    older_taps,  # [BN, BW]
    newest_tap,  # [BN]
    rows,
    columns,
    row_mask,
    window,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    HALF: tl.constexpr,
):
    """Convolve the outputs below C, advance their windows, apply SiLU; other outputs stay."""
    slots = tl.arange(0, BW)
    inside = columns < C
    newest = total.to(window.dtype.element_ty)  # rounded as the window keeps it
    z = newest.to(tl.float32) * newest_tap[None, :] + tl.sum(older.to(tl.float32) * older_taps[None, :, :], axis=2)
    tl.debug_barrier()  # no thread may write what another has yet to read
    first = (rows[:, None] * C + columns[None, :]) * (W - 1)
    mask = row_mask[:, None] & inside[None, :]
    moves = (slots >= 1) & (slots < W - 1)
    tl.store(window + first[:, :, None] + (slots[None, None, :] - 1), older, mask=mask[:, :, None] & moves[None, None, :])
    tl.store(window + first + (W - 2), newest, mask=mask)
    return tl.where(inside[None, :], z * sigmoid(z, HALF), total)


@triton.jit
def _head_scales(squares, rows, channels, mask, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, eps):
    """The factor by which RMSNorm multiplies each channel of x."""
    total = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(squares + (rows * HEADS + channels // HEAD_DIM) * PARTS + part, mask=mask, other=0.0)
    return tl.rsqrt(total / HEAD_DIM + eps)


@triton.jit(do_not_specialize=["eps"])
def one_row_kernel(
    x,  # [R, K]
    weight,  # [N, K], with GLU [2 N, K]: gate, then up
    norm_weight,  # [K] or None: no norm of the row
    squares,  # [R, HEADS, PARTS] or None
    residual,  # [R, N] or None
    q_taps,  # or None: no convolution
    k_taps,
    v_taps,
    window,
    y,  # [R, N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GLU: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    CQ: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    HALF: tl.constexpr = weight.dtype.element_ty != tl.float32
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) + tl.arange(0, 1)
    row_mask = rows >= 0
    column_mask = columns < N
    k = tl.arange(0, BK)

    # Weights and windows are not written by the kernel before, so they are loaded while it still runs.
    tile = columns[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(weight + tile, mask=column_mask[:, None] & (k < K)[None, :], other=0.0)
    if GLU:
        w_up = tl.load(weight + N * K + tile, mask=column_mask[:, None] & (k < K)[None, :], other=0.0)
    if norm_weight is not None:
        factor = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    if window is not None:
        slots = tl.arange(0, BW)
        older = _older_inputs(window, rows, columns, row_mask, CQ + CK + CV, W, BW)
        older_taps = _taps(q_taps, k_taps, v_taps, columns[:, None], slots[None, :], (slots < W - 1)[None, :],
                           CQ, CK, CV, W)  # fmt: skip
        newest_tap = _taps(q_taps, k_taps, v_taps, columns, W - 1, column_mask, CQ, CK, CV, W)
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
            value *= _head_scales(squares, tl.program_id(1), channels, inner, HEADS, HEAD_DIM, PARTS, eps)
        total += tl.sum(w.to(tl.float32) * value[None, :], axis=1)
        if GLU:
            total_up += tl.sum(w_up.to(tl.float32) * value[None, :], axis=1)
    if norm_weight is not None:
        inverse = tl.rsqrt(square_sum / K + eps)
        total *= inverse
        if GLU:
            total_up *= inverse
    if GLU:
        total = total * sigmoid(total, HALF) * total_up
    result = total[None, :]
    if window is not None:
        result = _convolve(result, older, older_taps, newest_tap, rows, columns, row_mask, window, CQ + CK + CV, W, BW,
                           HALF)  # fmt: skip
    _finish(result, rows, columns, row_mask, residual, y, N)


@triton.jit(do_not_specialize=["eps", "R"])
def few_rows_kernel(
    x,
    weight,
    norm_weight,
    squares,
    residual,
    q_taps,
    k_taps,
    v_taps,
    window,
    y,
    eps,
    R,
    N: tl.constexpr,
    K: tl.constexpr,
    GLU: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    CQ: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    HALF: tl.constexpr = weight.dtype.element_ty != tl.float32
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row_mask = rows < R
    column_mask = columns < N
    if AHEAD:
        prefetch_rows(weight, columns, N, K, LINE, LINES)
        if GLU:
            prefetch_rows(weight + N * K, columns, N, K, LINE, LINES)
    wait_for_inputs(AHEAD)

    k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    if GLU:
        total_up = tl.zeros([BM, BN], tl.float32)
    square_sum = tl.zeros([BM], tl.float32)
    weight_tile = columns[None, :].to(tl.int64) * K
    for start in tl.range(0, K, BK, num_stages=STAGES):
        channels = start + k
        inner = channels < K
        mask = inner[:, None] & column_mask[None, :]
        x_mask = row_mask[:, None] & inner[None, :]
        value = tl.load(x + rows[:, None] * K + channels[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight + weight_tile + channels[:, None], mask=mask, other=0.0)
        if GLU:
            w_up = tl.load(weight + N * K + weight_tile + channels[:, None], mask=mask, other=0.0)
        if norm_weight is not None:
            factor = tl.load(norm_weight + channels, mask=inner, other=0.0).to(tl.float32)
            wide = value.to(tl.float32)
            square_sum += tl.sum(wide * wide, axis=1)
            value = wide * factor[None, :]
        if squares is not None:
            value *= _head_scales(squares, rows[:, None], channels[None, :], x_mask, HEADS, HEAD_DIM, PARTS, eps)
        value = value.to(weight.dtype.element_ty)
        total = tl.dot(value, w, total, input_precision="ieee")
        if GLU:
            total_up = tl.dot(value, w_up, total_up, input_precision="ieee")
    if norm_weight is not None:
        inverse = tl.rsqrt(square_sum / K + eps)[:, None]
        total *= inverse
        if GLU:
            total_up *= inverse
    if GLU:
        total = total * sigmoid(total, HALF) * total_up
    if window is not None:
        slots = tl.arange(0, BW)
        older = _older_inputs(window, rows, columns, row_mask, CQ + CK + CV, W, BW)
        older_taps = _taps(q_taps, k_taps, v_taps, columns[:, None], slots[None, :], (slots < W - 1)[None, :],
                           CQ, CK, CV, W)  # fmt: skip
        newest_tap = _taps(q_taps, k_taps, v_taps, columns, W - 1, column_mask, CQ, CK, CV, W)
        total = _convolve(total, older, older_taps, newest_tap, rows, columns, row_mask, window, CQ + CK + CV, W, BW,
                          HALF)  # fmt: skip
    _finish(total, rows, columns, row_mask, residual, y, N)


class Tile(NamedTuple):
    """The part of a product that a program computes, and its launch options."""

    outputs: int
    inner: int
    """Inner channels per block: for one row all of them where they fit, loaded at once."""
    warps: int
    rows: int = 1
    stages: int = 1


@lru_cache(maxsize=1024)
def choose_tile(R: int, N: int, K: int, glu: bool, itemsize: int) -> Tile:
    """The tile of a product of R rows: by a table, without measuring."""
    if R == 1:
        inner = min(_next_power_of_2(K), 4096)
        outputs = max(1, 16384 // (inner * itemsize))
        if glu:
            outputs = max(1, outputs // 2)
        return Tile(outputs, inner, warps=4)
    rows = max(16, min(64, _next_power_of_2(R)))
    outputs = 16 if N <= 2048 else 32
    return Tile(outputs, 256 // itemsize, warps=4, rows=rows, stages=4)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def token_product(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    head_norm: HeadNorm | None = None,
    residual: Tensor | None = None,
    convolution: Convolution | None = None,
    glu: bool = False,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """A linear map of one token per row, and its neighbours in a block. No gradients: for inference.

    Args:
        x: `[R, K]`, contiguous, as all tensors here.
        weight: `[N, K]` float32, bfloat16 or float16; with `glu` `[2 N, K]`.
        norm_weight: `[K]`: RMSNorm of x before the map.
        norm_eps: its epsilon.
        head_norm: RMSNorm of the heads of x instead.
        residual: `[R, N]`, added to the result.
        convolution: of the first outputs.
        glu: the result is `silu(gate) * up` of the two halves of the map.
        dtype: of the result; the weight's unless given.
        tile: in place of `choose_tile`'s.

    Returns:
        `[R, N]`.
    """
    R, K = x.shape
    N = weight.shape[0] // (2 if glu else 1)
    y = x.new_empty(R, N, dtype=dtype or weight.dtype)
    squares, head_dim, eps = (None, 1, norm_eps) if head_norm is None else head_norm
    taps, window = ((None, None, None), None) if convolution is None else convolution
    heads = (1, 1) if squares is None else squares.shape[1:]
    channels = (0, 0, 0) if window is None else tuple(len(x) for x in taps)
    width = 2 if window is None else window.shape[-1] + 1
    itemsize = weight.element_size()
    tile = tile or choose_tile(R, N, K, glu, itemsize)
    ahead = launches_ahead(x.device)
    constants = _constants(R, N, K, glu, *heads, head_dim, eps, channels, width, tile, itemsize, ahead)
    kernel = one_row_kernel if tile.rows == 1 else few_rows_kernel
    with torch.cuda.device_of(x):
        launch(kernel, constants, x, weight, norm_weight, squares, residual, *taps, window, y)
    return y


@lru_cache(maxsize=1024)
def _constants(
    R: int, N: int, K: int, glu: bool, heads: int, parts: int, head_dim: int, eps: float,
    channels: tuple[int, int, int], width: int, tile: Tile, itemsize: int, ahead: bool,
) -> Constants:  # fmt: skip
    CQ, CK, CV = channels
    sizes = {
        "N": N, "K": K, "GLU": glu, "HEADS": heads, "HEAD_DIM": head_dim, "PARTS": parts, "CQ": CQ, "CK": CK, "CV": CV,
        "W": width, "BW": _next_power_of_2(width - 1), "BN": tile.outputs, "BK": tile.inner, "AHEAD": ahead,
        "num_warps": tile.warps,
    }  # fmt: skip
    if ahead:
        sizes["launch_pdl"] = True
    grid = -(-N // tile.outputs), -(-R // tile.rows)
    if tile.rows == 1:
        return Constants(*grid, eps=eps, **sizes)
    line = 128 // itemsize
    sizes |= {"BM": tile.rows, "STAGES": tile.stages, "LINE": line, "LINES": _next_power_of_2(-(-K // line))}
    return Constants(*grid, eps=eps, R=R, **sizes)
