"""Operations between the products of a decoding step for several rows: sums of parts with norms and SwiGLU.

A product for few rows has parts, each over some of the inner channels, so that all multiprocessors take part. The next
operation adds them up.
"""

from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, wait_for_inputs
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.triton.launch import Constants

_CHANNELS = 1024
"""Outputs of one program, except for the norm of a row."""


class RowNorm(Protocol):
    """The weight and epsilon of an RMSNorm over rows."""

    weight: Any
    """`[D]`."""
    eps: float


class HeadNorm(NamedTuple):
    """An RMSNorm of the heads of a tensor that has been multiplied by the weight and still needs the division."""

    squares: Tensor
    """`[R, heads, parts]` float32: partial sums over each head of the squares to be averaged; contiguous."""
    head_dim: int
    eps: float


@triton.jit
def head_scale(squares, head, mask, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, eps):
    """The factors by which RMSNorm multiplies heads, given by their indices in `[R, heads]`."""
    total = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(squares + head * PARTS + part, mask=mask, other=0.0)
    return tl.rsqrt(total / HEAD_DIM + eps)


@triton.jit(do_not_specialize=["eps"])
def add_parts_kernel(
    parts,  # [S, R, D] or None
    residual,  # [R, D]
    norm_weight,  # [D] or None
    total,  # [R, D]; may be None without parts
    normed,  # [R, D] or None
    R,
    eps,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BD)
    mask = columns < D
    if norm_weight is not None:
        weight = tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(AHEAD)
    x = tl.load(residual + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    if parts is not None:
        for part in tl.static_range(S):
            x += tl.load(parts + (part * R + row) * D + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)  # the norm is that of the stored sum
        tl.store(total + row * D + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if norm_weight is not None:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
        tl.store(normed + row * D + columns, x.to(normed.dtype.element_ty), mask=mask)


def add_parts(parts: Tensor | None, residual: Tensor, norm: RowNorm | None) -> tuple[Tensor, Tensor]:
    """A product added to the residual stream, and the norm of the sum. It has no gradients.

    Args:
        parts: `[S, R, D]`, whose sum over S is the product; None: nothing is added. Contiguous, as all tensors here.
        residual: `[R, D]`.
        norm: an RMSNorm; None: none is wanted.

    Returns:
        The sum and its norm (the sum again if none is wanted), `[R, D]` in the residual's dtype.
    """
    R, D = residual.shape
    total = residual if parts is None else torch.empty_like(residual)
    normed, weight, eps = (None, None, 0.0) if norm is None else (torch.empty_like(residual), norm.weight, norm.eps)
    sizes, stored = (0 if parts is None else len(parts), R, D, eps), None if parts is None else total
    launch_step(add_parts_kernel, _add_constants, sizes, parts, residual, weight, stored, normed)
    return total, total if normed is None else normed


def _add_constants(S: int, R: int, D: int, eps: float) -> Constants:
    block = triton.next_power_of_2(D)
    return Constants(R, R=R, eps=eps, S=S, D=D, BD=block, num_warps=max(1, min(16, block // 256)))


@triton.jit
def swiglu_parts_kernel(
    parts,  # [S, R, 2 N]: gate, then up
    y,  # [R, N]
    R,
    S: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = (tl.program_id(0) % BLOCKS) * BN + tl.arange(0, BN)
    mask = columns < N
    wait_for_inputs(AHEAD)
    gate = tl.zeros([BN], tl.float32)
    up = tl.zeros([BN], tl.float32)
    for part in tl.static_range(S):
        first = (part * R + row) * (2 * N)
        gate += tl.load(parts + first + columns, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(parts + first + N + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * sigmoid(gate, y.dtype.element_ty != tl.float32) * up
    tl.store(y + row * N + columns, result.to(y.dtype.element_ty), mask=mask)


def swiglu_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up` of a product in parts `[S, R, 2 N]`: `[R, N]` in `dtype`. It has no gradients."""
    S, R, N = parts.shape[0], parts.shape[1], parts.shape[2] // 2
    y = parts.new_empty(R, N, dtype=dtype)
    launch_step(swiglu_parts_kernel, _swiglu_constants, (S, R, N), parts, y)
    return y


def _swiglu_constants(S: int, R: int, N: int) -> Constants:
    return Constants(R * -(-N // _CHANNELS), R=R, S=S, N=N, BN=_CHANNELS, num_warps=4)


@triton.jit(do_not_specialize=["eps"])
def norm_heads_kernel(
    z,  # [R, HEADS * HEAD_DIM] float32
    squares,  # [R, HEADS, PARTS]
    y,
    eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (HEADS * HEAD_DIM + BN - 1) // BN
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channels = (tl.program_id(0) % BLOCKS) * BN + tl.arange(0, BN)
    mask = channels < HEADS * HEAD_DIM
    wait_for_inputs(AHEAD)
    x = tl.load(z + row * (HEADS * HEAD_DIM) + channels, mask=mask, other=0.0)
    x *= head_scale(squares, row * HEADS + channels // HEAD_DIM, mask, HEAD_DIM, PARTS, eps)
    tl.store(y + row * (HEADS * HEAD_DIM) + channels, x.to(y.dtype.element_ty), mask=mask)


def norm_heads(z: Tensor, norm: HeadNorm, dtype: torch.dtype) -> Tensor:
    """`z` `[R, heads * head_dim]` float32, its heads normalised, in `dtype`. It has no gradients."""
    y = torch.empty_like(z, dtype=dtype)
    _, heads, parts = norm.squares.shape
    launch_step(norm_heads_kernel, _head_constants, (len(z), heads, norm.head_dim, parts, norm.eps), z, norm.squares, y)
    return y


def _head_constants(R: int, heads: int, head_dim: int, parts: int, eps: float) -> Constants:
    blocks = -(-heads * head_dim // _CHANNELS)
    return Constants(
        R * blocks, eps=eps, HEADS=heads, HEAD_DIM=head_dim, PARTS=parts, BN=_CHANNELS, num_warps=4
    )  # fmt: skip
