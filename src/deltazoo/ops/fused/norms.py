"""Norms over the last axis, each in one pass over memory, forward and backward; computed in float32 at least.

    l2_norm             y = x / sqrt(sum x^2 + eps)
    rms_norm            y = x / sqrt(mean x^2 + eps) * w                                            (arXiv:1910.07467)
    add_rms_norm        rms_norm of total = x + residual, and total
    gated_rms_norm      y = x / sqrt(mean x^2 + eps) * w * g(gate),       g = SiLU, sigmoid or another function

A backward pass keeps the input (the sum, if there is a residual), the gate and the weight.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.names import function_of
from deltazoo.ops.dtypes import at_least_float32, autocast_dtype
from deltazoo.ops.fused.choice import FUSED_ACTIVATIONS, GATE_ACTIVATIONS, L2_NORM_EPS, takes_kernel
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_blocks, row_operator, sum_of_parts
from deltazoo.ops.recompute import declare_recomputable, recomputable

_MOST_PARTS = 512
"""Most programs of a backward pass: four per multiprocessor of an H100. Each sums a part of the weight's gradient."""

_MOST_GATED_PARTS = 4096
"""Most programs of the backward pass of the gated norm."""


def l2_norm(x: Tensor, eps: float = L2_NORM_EPS, *, fused: bool | None = None) -> Tensor:
    """`x * rsqrt(sum x^2 + eps)` over the last axis, in x's dtype; recomputed in a backward pass.

    The epsilon is inside the root, as in the released checkpoints, and bounds the gradient at the zero vector.

    Args:
        x: `[..., D]`.
        eps: added to the sum of squares.
    """
    kernel = takes_kernel(fused, x, columns=x.shape[-1])
    return recomputable(_l2_operator if kernel else _l2_torch, x, eps)


def _l2_torch(x: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    fused: bool | None = None,
    dtype: torch.dtype | None = None,
    feeds_linear: bool = False,
) -> Tensor:
    """`x * rsqrt(mean x^2 + eps) * weight` over the last axis; recomputed in a backward pass.

    Args:
        x: `[..., D]`.
        weight: `[D]`.
        eps: added to the mean square.
        dtype: dtype of the result; None: that of x.
        feeds_linear: only linear maps read the result. Under autocast the kernel then writes it in the dtype that each
            of them would cast it to.

    Returns:
        `[..., D]`.
    """
    dtype = dtype or x.dtype
    if takes_kernel(fused, x, weight, columns=x.shape[-1]):
        return recomputable(_rms_operator, x, weight, eps, _kernel_dtype(x, dtype, feeds_linear))
    return recomputable(_rms_torch, x, weight, eps, dtype)


def _rms_torch(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The norm by torch, whose kernel on a GPU computes in float32 inside and keeps no float32 copy of x."""
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    return _wide_rms(x, weight, eps).to(dtype)


def _wide_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps)


def _kernel_dtype(x: Tensor, dtype: torch.dtype, feeds_linear: bool) -> torch.dtype:
    return (autocast_dtype(x.device) or dtype) if feeds_linear else dtype


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fused: bool | None = None, feeds_linear: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of `x + residual`, and that sum, in torch's dtype for it; the backward pass keeps the sum, not x.

    Args:
        x, residual: tensors of one shape `[..., D]`.
        weight, eps, fused, feeds_linear: see `rms_norm`.

    Raises:
        ValueError: tensors of two shapes for a kernel.
    """
    if not takes_kernel(fused, x, residual, weight, columns=x.shape[-1]):
        return recomputable(_add_rms_torch, x, residual, weight, eps)
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    dtype = _kernel_dtype(x, torch.promote_types(x.dtype, residual.dtype), feeds_linear)
    y, total = _add_rms_operator(x, residual, weight, eps, dtype)
    declare_recomputable(y, _rms_operator, total, weight, eps, dtype)
    return y, total


def _add_rms_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _rms_torch(total, weight, eps, total.dtype), total


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str | Callable[[Tensor], Tensor],
    *,
    fused: bool | None = None,
) -> Tensor:
    """`rms_norm(x) * activation(gate)`, recomputed in a backward pass.

    Args:
        x, gate: `[..., D]`.
        weight: `[D]`.
        eps: added to the mean square.
        activation: a name in `GATE_ACTIVATIONS`, or a function of each element; torch computes all except
            `FUSED_ACTIVATIONS`.

    Returns:
        `[..., D]` in x's dtype.
    """
    if activation in FUSED_ACTIVATIONS and takes_kernel(fused, x, gate, weight):
        return recomputable(_gated_operator, x, gate, weight, eps, activation == "silu")
    known = GATE_ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    function = known or function_of("gate_activation", activation, GATE_ACTIVATIONS)
    return recomputable(_gated_torch, x, gate, weight, eps, function)


def _gated_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, function: Callable[[Tensor], Tensor]) -> Tensor:
    return (_wide_rms(x, weight, eps) * function(at_least_float32(gate))).to(x.dtype)


@triton.jit(do_not_specialize=["R", "eps"])
def norm_forward_kernel(x, residual, gate, weight, y, total, R, eps, D: tl.constexpr, SILU: tl.constexpr,
                        BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The norm of x, of `x + residual`, which is stored in `total`, or of x times the activated gate.

    Without `weight` it is the L2 norm.
    """
    COUNT: tl.constexpr = D if weight is not None else 1
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BD)
    column_mask = columns < D
    mask = (rows < R)[:, None] & column_mask[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    a = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        a += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = a.to(total.dtype.element_ty)  # the norm is that of the stored sum
        tl.store(total + offsets, rounded, mask=mask)
        a = rounded.to(tl.float32)
    if gate is not None:
        g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(a * a, axis=1) / COUNT + eps)[:, None]
    if gate is not None:
        factor = sigmoid(g, x.dtype.element_ty != tl.float32)
        if SILU:
            factor *= g
        tl.store(y + offsets, (a * inverse * w[None, :] * factor).to(y.dtype.element_ty), mask=mask)
    else:
        a *= inverse
        if weight is not None:
            a *= tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        tl.store(y + offsets, a.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "eps"])
def norm_backward_kernel(total, gate, weight, d_y, d_sum, d_total, d_gate, d_x, d_weight, R, eps, D: tl.constexpr,
                         SILU: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The gradients of the norm (without `weight` the L2 norm): `d_total` is that of its input, `d_x`, unless None, the
    same in another dtype, and `d_weight [programs, D]` are parts of a sum.
    """
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
        if gate is not None:
            g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
        if d_sum is not None:
            added = tl.load(d_sum + offsets, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, axis=1) / COUNT + eps)[:, None]
        normal = a * inverse
        if gate is not None:
            factor = sigmoid(g, total.dtype.element_ty != tl.float32)
            slope = factor * (1 - factor)
            if SILU:
                slope = factor + g * slope
                factor *= g
            tl.store(d_gate + offsets, (d * normal * w[None, :] * slope).to(d_gate.dtype.element_ty), mask=mask)
            d *= factor
        if weight is not None:
            sums += d * normal
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
def _constants(shape: torch.Size, eps: float, most: int | None = None, silu: bool | None = None) -> Constants:
    """Grid and constants of a norm; with `silu` True or False of a gated one."""
    D = shape[-1]
    programs, tile = row_blocks(shape.numel() // D, D, most)
    warps = 4 if silu is not None else 8 if tile["BD"] <= 4096 else 16
    return Constants(programs, R=shape.numel() // D, eps=eps, D=D, SILU=bool(silu), **tile, num_warps=warps)


def _l2_forward(x, eps):
    return _rms_forward(x, None, eps, x.dtype)


def _l2_backward(x, eps, d_y):
    return _sum_backward(x, None, eps, d_y, None, x.dtype)[0]


def _rms_forward(x, weight, eps, dtype, residual=None, total=None):
    """The norm of x, or of its sum with a residual, which is stored in `total`; without a weight the L2 norm."""
    y = torch.empty_like(x, dtype=dtype)
    launch(norm_forward_kernel, _constants(x.shape, eps), x, residual, None, weight, y, total)
    return y


def _rms_backward(x, weight, eps, dtype, d_y):
    d_x, _, d_weight = _sum_backward(x, weight, eps, d_y, None, x.dtype)
    return d_x, d_weight


def _sum_backward(total, weight, eps, d_y, d_sum, dtype):
    """Gradients of the sum, in its dtype and in `dtype` (None if they are equal), and of the weight, if any."""
    d_total = torch.empty_like(total)
    d_x = None if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    constants = _constants(total.shape, eps, _MOST_PARTS)
    parts = None if weight is None else total.new_empty(*constants.grid, *weight.shape, dtype=torch.float32)
    launch(norm_backward_kernel, constants, total, None, weight, d_y, d_sum, d_total, None, d_x, parts)
    return d_total, d_x, None if parts is None else sum_of_parts(parts, weight.dtype)


def _sum_backward_fake(total, weight, eps, d_y, d_sum, dtype):
    d_x = None if dtype == total.dtype else total.new_empty(total.shape, dtype=dtype)
    return total.new_empty(total.shape), d_x, weight.new_empty(weight.shape)


def _add_forward(x, residual, weight, eps, dtype):
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    return _rms_forward(x, weight, eps, dtype, residual, total), total


def _add_fake(x, residual, weight, eps, dtype):
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=dtype), total


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


def _gated_forward(x, gate, weight, eps, silu):
    y = torch.empty_like(x)
    launch(norm_forward_kernel, _constants(x.shape, eps, None, silu), x, None, gate, weight, y, None)
    return y


def _gated_backward(x, gate, weight, eps, silu, d_y):
    d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
    constants = _constants(x.shape, eps, _MOST_GATED_PARTS, silu)
    parts = x.new_empty(*constants.grid, *weight.shape, dtype=torch.float32)
    launch(norm_backward_kernel, constants, x, gate, weight, d_y, None, d_x, d_gate, None, parts)
    return d_x, d_gate, parts.sum(0).to(weight.dtype)


_l2_operator = row_operator("l2_norm(Tensor x, float eps) -> Tensor", _l2_forward, _l2_backward)

_rms_operator = row_operator(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor",
    _rms_forward,
    _rms_backward,
    fake=lambda x, weight, eps, dtype: x.new_empty(x.shape, dtype=dtype),
)

_add_rms_operator = row_operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _add_forward,
    _sum_backward,
    fake=_add_fake,
    backward_schema="add_rms_norm_backward(Tensor total, Tensor weight, float eps, Tensor d_y, Tensor? d_sum, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    backward_fake=_sum_backward_fake,
    save=_add_save,
    gradients=_add_gradients,
)

_gated_operator = row_operator(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, bool silu) -> Tensor",
    _gated_forward,
    _gated_backward,
)
