"""The decay gate `g = -exp(A_log) softplus(a + dt_bias)` in one pass over memory, forward and backward.

    x = a + dt_bias      log_decay = -exp(A_log) log(1 + exp(x))      d_a = d_dt_bias = -exp(A_log) sigmoid(x) d

`A_log` is one number per head, `dt_bias` one per head and channel. A saturating gate is `5 (exp(g / 5) - 1)`, whose
derivative `exp(g / 5)` multiplies d. The backward pass keeps only the inputs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.fused.kernels.sigmoid import exponential
from deltazoo.ops.fused.kernels.sum_of_parts import sum_of_parts
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["exponential_minus_1", "softplus", "softplus_decay"]

_MOST_COLUMNS = 1024
"""Most columns of a program; more take several programs."""

_MOST_PROGRAMS = 2048
"""Most programs of the forward pass along the rows: each makes the rates of its columns, for several rows."""

_MOST_PARTS = 512
"""Most programs of the backward pass along the rows. Each sums a part of the parameters' gradients."""


@triton.jit
def _quotient(x, y):
    """`x / y` to a rounding, for y from 1 to 3: the device's own errs by two."""
    reciprocal = 1 / y
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, y, x), reciprocal, quotient)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` and its derivative, the logistic function, to a few roundings of float32.

    With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) = 2 artanh(e / (2 + e)), a series in odd powers of
    at most 1/3. The logarithm of a sum near 1 would lose the small steps that models start from.
    """
    e = exponential(-tl.abs(x))
    s = _quotient(e, 2 + e)
    t = s * s
    series = 1 / 15
    series = tl.fma(t, series, 1 / 13)
    series = tl.fma(t, series, 1 / 11)
    series = tl.fma(t, series, 1 / 9)
    series = tl.fma(t, series, 1 / 7)
    series = tl.fma(t, series, 1 / 5)
    series = tl.fma(t, series, 1 / 3)
    log = 2 * tl.fma(s * t, series, s)
    return tl.maximum(x, 0.0) + log, _quotient(tl.where(x >= 0, 1.0, e), 1 + e)


@triton.jit
def exponential_minus_1(x):
    """`exp(x) - 1`, x <= 0, to a few roundings: near 0, where the difference loses digits, by its Taylor series."""
    series = 1 / 3628800
    series = tl.fma(x, series, 1 / 362880)
    series = tl.fma(x, series, 1 / 40320)
    series = tl.fma(x, series, 1 / 5040)
    series = tl.fma(x, series, 1 / 720)
    series = tl.fma(x, series, 1 / 120)
    series = tl.fma(x, series, 1 / 24)
    series = tl.fma(x, series, 1 / 6)
    series = tl.fma(x, series, 0.5)
    return tl.where(x > -1.0, tl.fma(x * x, series, x), exponential(x) - 1)


@triton.jit
def _columns(A_log, dt_bias, C, D: tl.constexpr, BC: tl.constexpr):
    """A program's columns, which of them exist, and their rate and bias."""
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = columns < C
    rate = _rate(tl.load(A_log + columns // D, mask=mask, other=0.0).to(tl.float32))
    return columns, mask, rate[None, :], tl.load(dt_bias + columns, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rate(A_log):
    e = exponential(-tl.abs(A_log))
    return tl.where(A_log > 0, tl.div_rn(1.0, e), e)


# C is specialised: unless Triton knows that rows are multiples of 16 elements apart, it reads single elements.
@triton.jit(do_not_specialize=["R"])
def softplus_decay_forward_kernel(a, A_log, dt_bias, log_decay, R, C, D: tl.constexpr,
                                  SATURATING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    columns, column_mask, rate, bias = _columns(A_log, dt_bias, C, D, BC)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR).to(tl.int64)
        mask = (rows < R)[:, None] & column_mask[None, :]
        offsets = rows[:, None] * C + columns[None, :]
        soft, _ = softplus(tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32) + bias)
        g = -rate * soft
        if SATURATING:
            g = 5 * exponential_minus_1(g / 5)
        tl.store(log_decay + offsets, g, mask=mask)


@triton.jit(do_not_specialize=["R"])
def softplus_decay_backward_kernel(a, A_log, dt_bias, d_log_decay, d_a, parts, R, C, D: tl.constexpr,
                                   SATURATING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """`parts [programs along the rows, 2, C]`: sums over rows of the gradients of A_log, per column, and of dt_bias."""
    columns, column_mask, rate, bias = _columns(A_log, dt_bias, C, D, BC)
    d_rate, d_bias = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        rows = block * BR + tl.arange(0, BR).to(tl.int64)
        mask = (rows < R)[:, None] & column_mask[None, :]
        offsets = rows[:, None] * C + columns[None, :]
        x = tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32) + bias
        d = tl.load(d_log_decay + offsets, mask=mask, other=0.0).to(tl.float32)
        soft, slope = softplus(x)
        if SATURATING:
            d *= exponential(-rate * soft / 5)
        d *= -rate
        d_rate += d * soft  # of A_log, for exp(A_log) is its own derivative
        d *= slope
        d_bias += d
        tl.store(d_a + offsets, d.to(d_a.dtype.element_ty), mask=mask)
    parts += tl.program_id(0).to(tl.int64) * (2 * C) + columns
    tl.store(parts, tl.sum(d_rate, 0), mask=column_mask)
    tl.store(parts + C, tl.sum(d_bias, 0), mask=column_mask)


@lru_cache(maxsize=1024)
def _constants(R: int, C: int, heads: int, saturating: bool, most: int) -> Constants:
    programs, tile = row_blocks(R, min(C, _MOST_COLUMNS), most)
    return Constants(
        programs, -(-C // tile["BD"]), R=R, C=C, D=C // heads, SATURATING=saturating, BR=tile["BR"], BC=tile["BD"],
        num_warps=8,
    )  # fmt: skip


def _forward(a, A_log, dt_bias, saturating):
    a, A_log, dt_bias = a.contiguous(), A_log.contiguous(), dt_bias.contiguous()
    C = dt_bias.numel()
    log_decay = torch.empty_like(a, dtype=torch.float32)
    with torch.cuda.device_of(a):
        constants = _constants(a.numel() // C, C, A_log.numel(), saturating, _MOST_PROGRAMS)
        launch(softplus_decay_forward_kernel, constants, a, A_log, dt_bias, log_decay)
    return log_decay


def _backward(a, A_log, dt_bias, saturating, d_log_decay):
    a, A_log, dt_bias = a.contiguous(), A_log.contiguous(), dt_bias.contiguous()
    d_log_decay = d_log_decay.contiguous()
    C = dt_bias.numel()
    d_a = torch.empty_like(a)
    constants = _constants(a.numel() // C, C, A_log.numel(), saturating, _MOST_PARTS)
    parts = a.new_empty(constants.grid[0], 2, C, dtype=torch.float32)
    with torch.cuda.device_of(a):
        launch(softplus_decay_backward_kernel, constants, a, A_log, dt_bias, d_log_decay, d_a, parts)
        d_rate, d_bias = sum_of_parts(parts, torch.float32)
    return d_a, d_rate.view(A_log.numel(), -1).sum(1).to(A_log.dtype), d_bias.to(dt_bias.dtype)


_ARGUMENTS = "Tensor a, Tensor A_log, Tensor dt_bias, bool saturating"

softplus_decay = DifferentiableOperator(
    f"softplus_decay({_ARGUMENTS}) -> Tensor",
    _forward,
    fake=lambda a, A_log, dt_bias, saturating: a.new_empty(a.shape, dtype=torch.float32),
    backward=Operator(
        f"softplus_decay_backward({_ARGUMENTS}, Tensor d_log_decay) -> (Tensor, Tensor, Tensor)",
        _backward,
    ),
    refusal=REFUSAL,
)  # fmt: skip
"""`softplus_decay(a, A_log, dt_bias, saturating)`, see `deltazoo.ops.fused.fused_softplus_decay`."""
