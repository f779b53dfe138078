"""RMSNorm of a tensor, or of a sum that is returned as well, in one pass over memory, forward and backward.

    total = x + residual,      y = total / sqrt(mean total^2 + eps) * w

The L2 norm is the same without w, with the sum of squares in place of their mean.

The backward pass keeps the sum (without a residual, the input) and the weight. With a linear map that reads the norm,
whose gradient needs it, the norm is made again in the same pass as the gradient of the input.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.fused.kernels.sum_of_parts import sum_of_parts
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["add_rms_norm", "l2_norm", "rms_norm", "rms_norm_linear"]

_MOST_PARTS = 512
"""Most programs of the backward pass: four per multiprocessor of an H100. Each sums a part of the weight's gradient."""


@triton.jit(do_not_specialize=["R", "eps"])
def rms_norm_forward_kernel(x, residual, weight, y, total, R, eps, D: tl.constexpr, BR: tl.constexpr,
                            BD: tl.constexpr):  # fmt: skip
    """Without `weight`, the L2 norm."""
    COUNT: tl.constexpr = D if weight is not None else 1
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BD)
    column_mask = columns < D
    mask = (rows < R)[:, None] & column_mask[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    a = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        a += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = a.to(total.dtype.element_ty)  # the norm is of the sum as it is stored
        tl.store(total + offsets, rounded, mask=mask)
        a = rounded.to(tl.float32)
    a *= tl.rsqrt(tl.sum(a * a, axis=1) / COUNT + eps)[:, None]
    if weight is not None:
        a *= tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, a.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "eps"])
def rms_norm_backward_kernel(total, weight, d_y, d_sum, d_total, d_x, y, d_weight, R, eps, D: tl.constexpr,
                             BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """`y`, unless None, is the norm again; it may be where `d_y` is. Without `weight`, of the L2 norm."""
    COUNT: tl.constexpr = D if weight is not None else 1
    columns = tl.arange(0, BD)
    column_mask = columns < D
    if weight is not None:
        w = tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)
        sums = tl.zeros([BR, BD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR).to(tl.int64)
        mask = (rows < R)[:, None] & column_mask[None, :]
        offsets = rows[:, None] * D + columns[None, :]
        a = tl.load(total + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
        if d_sum is not None:
            added = tl.load(d_sum + offsets, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, axis=1) / COUNT + eps)[:, None]
        normal = a * inverse
        if weight is not None:
            sums += d * normal
            if y is not None:
                tl.store(y + offsets, (normal * w[None, :]).to(y.dtype.element_ty), mask=mask)
            d *= w[None, :]
        d = inverse * (d - normal * (tl.sum(d * normal, axis=1) / COUNT)[:, None])
        if d_sum is not None:
            d += added
        tl.store(d_total + offsets, d.to(d_total.dtype.element_ty), mask=mask)
        if d_x is not None:
            tl.store(d_x + offsets, d.to(d_x.dtype.element_ty), mask=mask)
    if weight is not None:
        tl.store(d_weight + tl.program_id(0) * D + columns, tl.sum(sums, axis=0), mask=column_mask)


@lru_cache(maxsize=1024)
def _constants(R: int, D: int, eps: float, most: int | None = None) -> Constants:
    programs, tile = row_blocks(R, D, most)
    warps = 8 if tile["BD"] <= 4096 else 16
    return Constants(programs, R=R, eps=eps, D=D, **tile, num_warps=warps)


def _forward(x, weight, eps, dtype):
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    D = x.shape[-1]
    with torch.cuda.device_of(x):
        launch(rms_norm_forward_kernel, _constants(x.numel() // D, D, eps), x, None, weight, y, None)
    return y


def _add_forward(x, residual, weight, eps, dtype):
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = torch.empty_like(x, dtype=dtype)
    D = x.shape[-1]
    with torch.cuda.device_of(x):
        launch(rms_norm_forward_kernel, _constants(x.numel() // D, D, eps), x, residual, weight, y, total)
    return y, total


def _backward(total, weight, eps, d_y, d_sum, dtype, y=None):
    """Gradients of the sum, the same again in `dtype` (None if that is the sum's own), and of the weight.

    `y`, contiguous, becomes the norm again; it may be `d_y`.
    """
    total, weight, d_y = total.contiguous(), weight.contiguous(), d_y.contiguous()
    d_sum = None if d_sum is None else d_sum.contiguous()
    d_total = torch.empty_like(total)
    d_x = None if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    D = total.shape[-1]
    constants = _constants(total.numel() // D, D, eps, _MOST_PARTS)
    parts = total.new_empty(*constants.grid, D, dtype=torch.float32)
    with torch.cuda.device_of(total):
        launch(rms_norm_backward_kernel, constants, total, weight, d_y, d_sum, d_total, d_x, y, parts)
        d_weight = sum_of_parts(parts, weight.dtype)
    return d_total, d_x, d_weight


def _l2_forward(x, eps):
    x = x.contiguous()
    y = torch.empty_like(x)
    D = x.shape[-1]
    with torch.cuda.device_of(x):
        launch(rms_norm_forward_kernel, _constants(x.numel() // D, D, eps), x, None, None, y, None)
    return y


def _l2_backward(x, eps, d_y):
    x, d_y = x.contiguous(), d_y.contiguous()
    d_x = torch.empty_like(x)
    D = x.shape[-1]
    with torch.cuda.device_of(x):
        constants = _constants(x.numel() // D, D, eps, _MOST_PARTS)
        launch(rms_norm_backward_kernel, constants, x, None, d_y, None, d_x, None, None, None)
    return d_x


def _linear_forward(x, weight, linear, eps):
    return F.linear(_forward(x, weight, eps, x.dtype).flatten(2), linear)


def _linear_backward(x, weight, linear, eps, d_z):
    d_z = d_z.flatten(0, -2)
    y = d_z @ linear  # its gradient, until the kernel writes the norm there
    d_x, _, d_weight = _backward(x, weight, eps, y.view(x.shape), None, x.dtype, y)
    return d_x, d_weight, d_z.t() @ y


def _save(ctx, inputs, y):
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(backward, ctx, d_y):
    x, weight = ctx.saved_tensors
    d_x, _, d_weight = backward(x, weight, ctx.eps, d_y, None, x.dtype)
    return d_x, d_weight, None, None


def _add_save(ctx, inputs, results):
    x, residual, weight, ctx.eps, _ = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(results[1], weight)


def _add_gradients(backward, ctx, d_y, d_sum):
    total, weight = ctx.saved_tensors
    dtype, residual_dtype = ctx.dtypes
    d_total, d_x, d_weight = backward(total, weight, ctx.eps, d_y, d_sum, dtype)
    d_x = d_total if dtype == total.dtype else d_x
    return d_x, d_total.to(residual_dtype), d_weight, None, None


def _fake(x, weight, eps, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _add_fake(x, residual, weight, eps, dtype):
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=dtype), total


def _backward_fake(total, weight, eps, d_y, d_sum, dtype):
    d_x = None if dtype == total.dtype else total.new_empty(total.shape, dtype=dtype)
    return total.new_empty(total.shape), d_x, weight.new_empty(weight.shape)


_backward_operator = Operator(
    "rms_norm_backward(Tensor total, Tensor weight, float eps, Tensor d_y, Tensor? d_sum, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)

rms_norm = DifferentiableOperator(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor",
    _forward,
    fake=_fake,
    backward=_backward_operator,
    save=_save,
    gradients=_gradients,
    refusal=REFUSAL,
)
"""`rms_norm(x, weight, eps, dtype)`, see `deltazoo.ops.fused.fused_rms_norm`."""

add_rms_norm = DifferentiableOperator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _add_forward,
    fake=_add_fake,
    backward=_backward_operator,
    save=_add_save,
    gradients=_add_gradients,
    refusal=REFUSAL,
)
"""`add_rms_norm(x, residual, weight, eps, dtype)`, see `deltazoo.ops.fused.fused_add_rms_norm`."""

rms_norm_linear = DifferentiableOperator(
    "rms_norm_linear(Tensor x, Tensor weight, Tensor linear, float eps) -> Tensor",
    _linear_forward,
    fake=lambda x, weight, linear, eps: x.new_empty((*x.shape[:2], linear.shape[0])),
    backward=Operator(
        "rms_norm_linear_backward(Tensor x, Tensor weight, Tensor linear, float eps, Tensor d_z)"
        " -> (Tensor, Tensor, Tensor)",
        _linear_backward,
    ),
    refusal=REFUSAL,
)
"""`rms_norm_linear(x, weight, linear, eps)`, see `deltazoo.ops.fused.fused_rms_norm_linear`."""

l2_norm = DifferentiableOperator(
    "l2_norm(Tensor x, float eps) -> Tensor",
    _l2_forward,
    fake=lambda x, eps: x.new_empty(x.shape),
    backward=Operator("l2_norm_backward(Tensor x, float eps, Tensor d_y) -> Tensor", _l2_backward),
    refusal=REFUSAL,
)
"""`l2_norm(x, eps)`, see `deltazoo.ops.fused.fused_l2_norm`."""
