"""RMSNorm times an activated gate, in one pass over memory, forward and backward.

    y = x / sqrt(mean x^2 + eps) * w * g(gate),      g = SiLU or sigmoid

The backward pass keeps only the inputs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["gated_rms_norm"]

_MOST_PARTS = 4096
"""Most programs of the backward pass. Each sums a part of the weight's gradient."""


@triton.jit(do_not_specialize=["R", "eps"])
def gated_norm_forward_kernel(x, gate, weight, y, R, eps, D: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr,
                    BD: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BD)
    column_mask = columns < D
    mask = (rows < R)[:, None] & column_mask[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    a = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(a * a, axis=1) / D + eps)[:, None]
    factor = sigmoid(g, x.dtype.element_ty != tl.float32)
    if SILU:
        factor *= g
    tl.store(y + offsets, (a * inverse * w[None, :] * factor).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "eps"])
def gated_norm_backward_kernel(x, gate, weight, d_y, d_x, d_gate, d_weight, R, eps, D: tl.constexpr, SILU: tl.constexpr,
                     BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BD)
    column_mask = columns < D
    w = tl.load(weight + columns, mask=column_mask, other=0.0).to(tl.float32)
    sums = tl.zeros([BR, BD], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR).to(tl.int64)
        mask = (rows < R)[:, None] & column_mask[None, :]
        offsets = rows[:, None] * D + columns[None, :]
        a = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, axis=1) / D + eps)[:, None]
        normal = a * inverse
        factor = sigmoid(g, x.dtype.element_ty != tl.float32)
        slope = factor * (1 - factor)
        if SILU:
            slope = factor + g * slope
            factor *= g
        tl.store(d_gate + offsets, (d * normal * w[None, :] * slope).to(d_gate.dtype.element_ty), mask=mask)
        d *= factor
        sums += d * normal
        d *= w[None, :]
        d = inverse * (d - normal * (tl.sum(d * normal, axis=1) / D)[:, None])
        tl.store(d_x + offsets, d.to(d_x.dtype.element_ty), mask=mask)
    tl.store(d_weight + tl.program_id(0) * D + columns, tl.sum(sums, axis=0), mask=column_mask)


@lru_cache(maxsize=1024)
def _constants(R: int, D: int, eps: float, silu: bool, most: int | None = None) -> Constants:
    programs, tile = row_blocks(R, D, most)
    return Constants(programs, R=R, eps=eps, D=D, SILU=silu, **tile, num_warps=4)


def _forward(x, gate, weight, eps, silu):
    x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    D = x.shape[-1]
    with torch.cuda.device_of(x):
        launch(gated_norm_forward_kernel, _constants(x.numel() // D, D, eps, silu), x, gate, weight, y)
    return y


def _backward(x, gate, weight, eps, silu, d_y):
    x, gate, weight, d_y = x.contiguous(), gate.contiguous(), weight.contiguous(), d_y.contiguous()
    d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
    D = x.shape[-1]
    constants = _constants(x.numel() // D, D, eps, silu, _MOST_PARTS)
    parts = x.new_empty(*constants.grid, D, dtype=torch.float32)
    with torch.cuda.device_of(x):
        launch(gated_norm_backward_kernel, constants, x, gate, weight, d_y, d_x, d_gate, parts)
    return d_x, d_gate, parts.sum(0).to(weight.dtype)


_ARGUMENTS = "Tensor x, Tensor gate, Tensor weight, float eps, bool silu"

gated_rms_norm = DifferentiableOperator(
    f"gated_rms_norm({_ARGUMENTS}) -> Tensor",
    _forward,
    fake=lambda x, gate, weight, eps, silu: x.new_empty(x.shape),
    backward=Operator(
        f"gated_rms_norm_backward({_ARGUMENTS}, Tensor d_y) -> (Tensor, Tensor, Tensor)",
        _backward,
    ),
    refusal=REFUSAL,
)
"""`gated_rms_norm(x, gate, weight, eps, silu)`, see `deltazoo.ops.fused.fused_gated_rms_norm`."""
