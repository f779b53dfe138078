"""The rotary embedding in one pass over memory, forward and backward.

    y_i = cos_i x_i - sin_i x_{i+h}      y_{i+h} = cos_{i+h} x_{i+h} + sin_{i+h} x_i      i < h = d/2

for the first d channels of a head; the others stay. The backward pass is the transpose, and keeps the angles alone.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["rotary"]

_ELEMENTS = 4096
"""Elements that a program works on at a time."""


@triton.jit(do_not_specialize=["R", "angle_rows"])
def rotary_kernel(x, cos, sin, y, R, angle_rows, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
                  BACKWARD: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
                  BREST: tl.constexpr):  # fmt: skip
    """One program turns all heads of BR tokens, of R in all. The angles begin anew after `angle_rows` tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    heads, pairs = tl.arange(0, BH), tl.arange(0, BD)
    angles = (tokens % angle_rows)[:, None] * D + pairs[None, :]
    known = (tokens < R)[:, None] & (pairs < D // 2)[None, :]
    cos_first = tl.load(cos + angles, mask=known, other=0.0).to(tl.float32)[:, None, :]
    cos_second = tl.load(cos + angles + D // 2, mask=known, other=0.0).to(tl.float32)[:, None, :]
    sin_first = tl.load(sin + angles, mask=known, other=0.0).to(tl.float32)[:, None, :]
    sin_second = tl.load(sin + angles + D // 2, mask=known, other=0.0).to(tl.float32)[:, None, :]
    rows = tokens[:, None] * (H * K) + heads[None, :] * K
    mask = known[:, None, :] & (heads < H)[None, :, None]
    offsets = rows[:, :, None] + pairs[None, None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + D // 2, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin_first, sin_second = -sin_second, -sin_first
    tl.store(y + offsets, (cos_first * first - sin_first * second).to(y.dtype.element_ty), mask=mask)
    tl.store(y + offsets + D // 2, (cos_second * second + sin_second * first).to(y.dtype.element_ty), mask=mask)
    if D < K:
        rest = tl.arange(0, BREST)
        offsets = rows[:, :, None] + D + rest[None, None, :]
        mask = ((tokens < R)[:, None] & (heads < H)[None, :])[:, :, None] & (rest < K - D)[None, None, :]
        tl.store(y + offsets, tl.load(x + offsets, mask=mask), mask=mask)


@lru_cache(maxsize=1024)
def _constants(R: int, angle_rows: int, H: int, K: int, D: int, backward: bool) -> Constants:
    heads, pairs, rest = (triton.next_power_of_2(max(1, size)) for size in (H, D // 2, K - D))
    rows = max(1, _ELEMENTS // (heads * max(2 * pairs, rest)))
    return Constants(
        max(1, -(-R // rows)), R=R, angle_rows=angle_rows, H=H, K=K, D=D, BACKWARD=backward,
        BR=rows, BH=heads, BD=pairs, BREST=rest, num_warps=4,
    )  # fmt: skip


def _turn(x, cos, sin, backward):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    B, T, H, K = x.shape
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        constants = _constants(B * T, max(1, cos.shape[0] * T), H, K, cos.shape[-1], backward)
        launch(rotary_kernel, constants, x, cos, sin, y)
    return y


def _save(ctx, inputs, y):
    ctx.save_for_backward(*inputs[1:])


def _gradients(backward, ctx, d_y):
    return backward(d_y, *ctx.saved_tensors), None, None


rotary = DifferentiableOperator(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: _turn(x, cos, sin, False),
    fake=lambda x, cos, sin: x.new_empty(x.shape),
    backward=Operator(
        "rotary_backward(Tensor d_y, Tensor cos, Tensor sin) -> Tensor",
        lambda d_y, cos, sin: _turn(d_y, cos, sin, True),
    ),
    save=_save,
    gradients=_gradients,
    refusal=REFUSAL,
)
"""`rotary(x, cos, sin)`, see `deltazoo.ops.fused.fused_rotary`."""
