"""Short convolutions of queries, keys and values for one token, with SiLU, L2 norms and the new window: one launch.

    z = sum_i w_i x_{t-i}      s = z * sigmoid(z)  or z      y = s  or, per head,  s / sqrt(|s|^2 + eps)

The functions are those of `short_conv`. The window holds the inputs before the token. It advances by one token, in
place or into a new tensor.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.fused.choice import L2_NORM_EPS, takes_kernel
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.short_conv import convolve_window, is_silu, unit_heads
from deltazoo.ops.operator import Operator

_CHANNELS = 128
"""Channels of one program without a norm over heads: four per thread of its warp."""


def short_convolution_step(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    window: Tensor,
    *,
    activation: str = "silu",
    head_dims: tuple[int, int] = (0, 0),
    inplace: bool = False,
    fused: bool | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """The results of `short_convolution` for one token of queries, keys and values. The kernel has no gradients.

    Args:
        inputs: three `[B, 1, C_i]`.
        weights: three `[C_i, W]` or `[C_i, 1, W]`.
        window: `[B, C, S]`, the last S inputs before the token, concatenated, C the sum of the C_i; oldest first. S is
            W - 1, or more if a kernel computes.
        activation: see `short_convolution`.
        head_dims: `head_dim` of the first and of the second input, see `short_convolution`; heads of both have one
            size.
        inplace: whether the caller keeps `window` at its address. The kernel overwrites it if it is contiguous and in
            the inputs' dtype; torch returns a view that the caller copies.

    Returns:
        Three outputs `[B, 1, C_i]` in the inputs' dtype, computed in float32, and the new window.

    Raises:
        ValueError: a window that is too short, or heads of two sizes.
    """
    silu, (q_head, k_head) = is_silu(activation), head_dims
    widths = [x.shape[-1] for x in inputs]
    if not takes_kernel(fused, *inputs, *weights, window):
        y, window = convolve_window(window, torch.cat(inputs, dim=-1), torch.cat(weights), silu)
        parts = y.split(widths, dim=-1)
        heads = (*head_dims, 0)
        outputs = [unit_heads(part, head_dim) for part, head_dim in zip(parts, heads, strict=True)]
        return outputs, window if inplace else window.contiguous()
    if window.shape[-1] < weights[0].shape[-1] - 1:
        raise ValueError(
            f"{weights[0].shape[-1]} taps need a window of {weights[0].shape[-1] - 1} inputs before the token, got "
            f"{window.shape[-1]}"
        )
    if q_head and k_head and q_head != k_head:
        raise ValueError(f"heads of queries and keys must have one size, got head_dims={head_dims}")
    if inplace and window.dtype == inputs[0].dtype and window.is_contiguous():
        y = _into_window.overload(*inputs, *weights, window, silu, q_head, k_head)
    else:
        y, window = _into_new.overload(*inputs, *weights, window, silu, q_head, k_head)
    return y.split(widths, dim=-1), window


@triton.jit
def _of_block(block, q, k, v, Q_BLOCKS, K_BLOCKS):
    """The pointer, of three, to the input of a program's channels."""
    chosen = q
    if block >= Q_BLOCKS:
        chosen = k
    if block >= Q_BLOCKS + K_BLOCKS:
        chosen = v
    return chosen


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "eps"])
def short_conv_step_kernel(q, k, v, q_weight, k_weight, v_weight, window, new_window, y, q_row, k_row, v_row, eps,
                           CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, W: tl.constexpr, KEPT: tl.constexpr,
                           WIDTH: tl.constexpr, SILU: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
                           BC: tl.constexpr):  # fmt: skip
    """q `[B, CQ]`, k `[B, CK]` and v `[B, CV]` with contiguous channels, and their strides along B; weights `[C_i, W]`.

    window `[B, C, KEPT]`, oldest first, C = CQ + CK + CV, KEPT at least W - 1; new_window of its shape, or its memory;
    y `[B, C]`. WIDTH channels of a program: those of a head if one of the norms is wanted.
    """
    Q_BLOCKS: tl.constexpr = (CQ + WIDTH - 1) // WIDTH
    K_BLOCKS: tl.constexpr = (CK + WIDTH - 1) // WIDTH
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS + (CV + WIDTH - 1) // WIDTH
    HALF: tl.constexpr = q.dtype.element_ty != tl.float32
    block = tl.program_id(0) % BLOCKS
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + K_BLOCKS
    before = tl.where(is_q, 0, tl.where(is_v, CQ + CK, CQ))  # channels of the inputs before this one
    first = block - tl.where(is_q, 0, tl.where(is_v, Q_BLOCKS + K_BLOCKS, Q_BLOCKS))
    columns = first * WIDTH + tl.arange(0, BC)
    mask = (tl.arange(0, BC) < WIDTH) & (columns < tl.where(is_q, CQ, tl.where(is_v, CV, CK)))

    x = _of_block(block, q + row * q_row, k + row * k_row, v + row * v_row, Q_BLOCKS, K_BLOCKS)
    taps = _of_block(block, q_weight, k_weight, v_weight, Q_BLOCKS, K_BLOCKS) + columns * W
    value = tl.load(x + columns, mask=mask, other=0.0)
    z = value.to(tl.float32) * tl.load(taps + (W - 1), mask=mask, other=0.0).to(tl.float32)
    offsets = (row * (CQ + CK + CV) + before + columns) * KEPT
    for i in tl.static_range(1, KEPT + 1):  # from the newest to the oldest; each moves one step back
        slot = offsets + (KEPT - i)
        older = tl.load(window + slot, mask=mask, other=0.0)
        if i < W:
            z += older.to(tl.float32) * tl.load(taps + (W - 1 - i), mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # in place no thread may write what another has not yet read
        tl.store(new_window + slot, value, mask=mask)
        value = older
    s = z * sigmoid(z, HALF) if SILU else z
    if NORM_Q or NORM_K:
        inverse = tl.rsqrt(tl.sum(s * s, axis=0) + eps)
        normalised = (is_q & NORM_Q) | ((block >= Q_BLOCKS) & (block < Q_BLOCKS + K_BLOCKS) & NORM_K)
        s *= tl.where(normalised, inverse, 1.0)
    tl.store(y + row * (CQ + CK + CV) + before + columns, s.to(y.dtype.element_ty), mask=mask)


def _run(q, k, v, q_weight, k_weight, v_weight, window, new_window, silu, q_head, k_head):
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q_weight, k_weight, v_weight = (x.contiguous() for x in (q_weight, k_weight, v_weight))
    B, channels, rows = q.shape[0], (q.shape[-1], k.shape[-1], v.shape[-1]), (q.stride(0), k.stride(0), v.stride(0))
    constants = _constants(B, channels, rows, q_weight.shape[-1], window.shape[-1], silu, (q_head, k_head))
    y = q.new_empty(B, 1, sum(channels))
    launch(short_conv_step_kernel, constants, q, k, v, q_weight, k_weight, v_weight, window, new_window, y)
    return y


@lru_cache(maxsize=1024)
def _constants(
    B: int, channels: tuple[int, ...], rows: tuple[int, ...], W: int, kept: int, silu: bool, heads: tuple[int, int]
) -> Constants:
    (CQ, CK, CV), (q_row, k_row, v_row), (q_head, k_head) = channels, rows, heads
    width = q_head or k_head or min(_CHANNELS, CQ + CK + CV)
    block = triton.next_power_of_2(width)
    return Constants(
        B * sum(-(-x // width) for x in channels), q_row=q_row, k_row=k_row, v_row=v_row, eps=L2_NORM_EPS, CQ=CQ, CK=CK,
        CV=CV, W=W, KEPT=kept, WIDTH=width, SILU=silu, NORM_Q=q_head > 0, NORM_K=k_head > 0, BC=block,
        num_warps=max(1, block // 128),
    )  # fmt: skip


def _functional(q, k, v, q_weight, k_weight, v_weight, window, silu, q_head, k_head):
    window = window.to(q.dtype).contiguous()
    new_window = torch.empty_like(window)
    return _run(q, k, v, q_weight, k_weight, v_weight, window, new_window, silu, q_head, k_head), new_window


def _in_place(q, k, v, q_weight, k_weight, v_weight, window, silu, q_head, k_head):
    if not window.is_inference():  # autograd does not see that the kernel writes
        torch.autograd.graph.increment_version(window)
    return _run(q, k, v, q_weight, k_weight, v_weight, window, window, silu, q_head, k_head)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor v_weight"

_into_new = Operator(
    f"short_conv_step({_INPUTS}, Tensor window, bool silu, int q_head, int k_head) -> (Tensor, Tensor)",
    _functional,
    fake=lambda q, k, v, q_weight, k_weight, v_weight, window, *others: (
        q.new_empty(q.shape[0], 1, window.shape[1]),
        window.new_empty(window.shape, dtype=q.dtype),
    ),
)
_into_window = Operator(
    f"short_conv_step_({_INPUTS}, Tensor(a!) window, bool silu, int q_head, int k_head) -> Tensor",
    _in_place,
    fake=lambda q, k, v, q_weight, k_weight, v_weight, window, *others: q.new_empty(q.shape[0], 1, window.shape[1]),
)
