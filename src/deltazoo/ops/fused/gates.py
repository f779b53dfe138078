"""Gates in one pass over memory, forward and backward: the log-decay of the state, and factors per channel.

    softplus_log_decay  x = a + dt_bias    g = -exp(A_log) log(1 + exp(x))    d_a = d_dt_bias = -exp(A_log) d sigmoid(x)
    log_sigmoid_decay   g = log(sigmoid(a)) / slower = -log(1 + exp(-a)) / slower
    sigmoid_gate        f = L sigmoid(gate)           y = f x     d_x = f d     d_gate = f sigmoid(-gate) x d
                        f = sqrt(L sigmoid(gate))     y = f x     d_x = f d     d_gate = f sigmoid(-gate) x d / 2

`A_log` is one number per head, `dt_bias` one per head and channel. A saturating decay is `5 (exp(g / 5) - 1)`, whose
derivative `exp(g / 5)` multiplies d. The backward passes keep only the inputs.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.dtypes import at_least_float32, wide_dtype
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.device_math import exponential, exponential_minus_1, logistic, softplus
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import element_constants, row_blocks, row_operator, sum_of_parts
from deltazoo.ops.recompute import recomputable

_MOST_COLUMNS = 1024
"""Most columns of a program; more take several programs."""

_MOST_PROGRAMS = 2048
"""Most programs of the forward pass along the rows. Each computes the rates of its columns for several rows."""

_MOST_PARTS = 512
"""Most programs of the backward pass along the rows. Each sums a part of the parameters' gradients."""

_ONE_PART = 8192
"""Elements that one program reads in the time that a further launch for a sum of parts would take."""


def softplus_log_decay(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, *, saturating: bool = False, fused: bool | None = None
) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`, the log-decay of `deltazoo.ops.decay`.

    Args:
        a: `[B, T, HV]` or `[B, T, HV, K]`.
        A_log: `[HV]`.
        dt_bias: `[HV]`, or `[HV * K]` with a decay per channel.
        saturating: whether the log-decay is bounded by -5 (`saturating_decay`).

    Returns:
        `log_decay` in a's shape, float32 (float64 stays).

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if takes_kernel(fused, a, A_log, dt_bias):
        _require_shapes(a, A_log, dt_bias)
        return _softplus_decay(a, A_log, dt_bias, saturating)
    rate, x = rate_and_logit(a, A_log, dt_bias)
    g = -rate * F.softplus(x)
    return 5 * torch.expm1(g / 5) if saturating else g


def rate_and_logit(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(A_log)` and `a + dt_bias`, which broadcast with each other; float32 (float64 stays)."""
    _require_shapes(a, A_log, dt_bias)
    dtype = wide_dtype(a)
    rate, bias = A_log.to(dtype).exp(), dt_bias.to(dtype)
    if a.ndim == 4:
        rate, bias = rate[:, None], bias.reshape(a.shape[2:])
    return rate, a + bias  # in the wider dtype, that of the bias


def _require_shapes(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    if a.ndim not in (3, 4) or A_log.shape != a.shape[2:3] or dt_bias.shape != (a.shape[2:].numel(),):
        raise ValueError(
            "expected a [B, T, HV] with A_log [HV] and dt_bias [HV], or a [B, T, HV, K] with A_log [HV] and "
            f"dt_bias [HV*K], got {tuple(a.shape)}, {tuple(A_log.shape)}, {tuple(dt_bias.shape)}"
        )


def log_sigmoid_decay(a: Tensor, slower: float, *, fused: bool | None = None) -> Tensor:
    """`log(sigmoid(a)) / slower` of a `[B, T, HV, K]`, float32 (float64 stays); the backward pass keeps only a."""
    return recomputable(_log_sigmoid_by_softplus if takes_kernel(fused, a) else _log_sigmoid, a, slower)


def _log_sigmoid(a: Tensor, slower: float) -> Tensor:
    return F.logsigmoid(at_least_float32(a)) / slower


def _log_sigmoid_by_softplus(a: Tensor, slower: float) -> Tensor:
    A_log = a.new_full(a.shape[2:3], -math.log(slower), dtype=torch.float32)
    return _softplus_decay(-a, A_log, A_log.new_zeros(a.shape[2:].numel()), False)


def sigmoid_gate(
    gate: Tensor, x: Tensor, largest: float = 1.0, *, root: bool = False, fused: bool | None = None
) -> Tensor:
    """`largest * sigmoid(gate) * x`, computed in float32 and rounded once; the backward pass keeps only gate and x.

    Args:
        gate, x: tensors of one shape.
        largest: upper end of the factor.
        root: whether to multiply by the root of the factor instead.

    Returns:
        The product, in x's shape and dtype.

    Raises:
        ValueError: tensors of two shapes for a kernel.
    """
    if not takes_kernel(fused, x, gate):
        return recomputable(_gate_in_torch, gate, x, largest, root)
    if gate.shape != x.shape:
        raise ValueError(f"gate and x must have one shape, got {tuple(gate.shape)} and {tuple(x.shape)}")
    return recomputable(_sigmoid_gate, gate, x, largest, root)


def _gate_in_torch(gate: Tensor, x: Tensor, largest: float, root: bool) -> Tensor:
    gate = at_least_float32(gate)
    if root:  # the root of a sigmoid that underflows would have an infinite gradient; half its logarithm has none
        return (math.sqrt(largest) * torch.exp(F.logsigmoid(gate) / 2) * x).to(x.dtype)
    return (largest * torch.sigmoid(gate) * x).to(x.dtype)


@triton.jit
def _columns(A_log, dt_bias, C, D: tl.constexpr, BC: tl.constexpr):
    """A program's columns, the mask of those that exist, and their rate and bias."""
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
        d_rate += d * soft  # the gradient of A_log, since exp(A_log) is its own derivative
        d *= slope
        d_bias += d
        tl.store(d_a + offsets, d.to(d_a.dtype.element_ty), mask=mask)
    parts += tl.program_id(0).to(tl.int64) * (2 * C) + columns
    tl.store(parts, tl.sum(d_rate, 0), mask=column_mask)
    tl.store(parts + C, tl.sum(d_bias, 0), mask=column_mask)


@lru_cache(maxsize=1024)
def _decay_constants(R: int, C: int, heads: int, saturating: bool, most: int) -> Constants:
    programs, tile = row_blocks(R, min(C, _MOST_COLUMNS), most)
    return Constants(
        programs, -(-C // tile["BD"]), R=R, C=C, D=C // heads, SATURATING=saturating, BR=tile["BR"], BC=tile["BD"],
        num_warps=8,
    )  # fmt: skip


def _decay_forward(a, A_log, dt_bias, saturating):
    C = dt_bias.numel()
    log_decay = torch.empty_like(a, dtype=torch.float32)
    constants = _decay_constants(a.numel() // C, C, A_log.numel(), saturating, _MOST_PROGRAMS)
    launch(softplus_decay_forward_kernel, constants, a, A_log, dt_bias, log_decay)
    return log_decay


def _decay_backward(a, A_log, dt_bias, saturating, d_log_decay):
    C = dt_bias.numel()
    d_a = torch.empty_like(a)
    most = _MOST_PARTS if a.numel() > _ONE_PART else 1
    constants = _decay_constants(a.numel() // C, C, A_log.numel(), saturating, most)
    parts = a.new_empty(constants.grid[0], 2, C, dtype=torch.float32)
    launch(softplus_decay_backward_kernel, constants, a, A_log, dt_bias, d_log_decay, d_a, parts)
    d_rate, d_bias = sum_of_parts(parts, torch.float32)
    return d_a, d_rate.view(A_log.numel(), -1).sum(1).to(A_log.dtype), d_bias.to(dt_bias.dtype)


_softplus_decay = row_operator(
    "softplus_decay(Tensor a, Tensor A_log, Tensor dt_bias, bool saturating) -> Tensor",
    _decay_forward,
    _decay_backward,
    fake=lambda a, *others: a.new_empty(a.shape, dtype=torch.float32),
)


@triton.jit
def _factor(gate, LARGEST: tl.constexpr, ROOT: tl.constexpr):
    """The factor f, and `sigmoid(-gate)`."""
    s, rest, root = logistic(gate)
    return root * tl.sqrt(tl.full([], LARGEST, tl.float32)) if ROOT else LARGEST * s, rest


# N is specialised: unless Triton knows that N is a multiple of 16, it masks and reads single elements.
@triton.jit
def sigmoid_gate_forward_kernel(gate, x, y, N, LARGEST: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    f, _ = _factor(g, LARGEST, ROOT)
    tl.store(y + offsets, (f * value).to(y.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_gate_backward_kernel(gate, x, d_y, d_gate, d_x, N, LARGEST: tl.constexpr, ROOT: tl.constexpr,
                                 BLOCK: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
    f, rest = _factor(g, LARGEST, ROOT)
    d *= f
    tl.store(d_x + offsets, d.to(d_x.dtype.element_ty), mask=mask)
    d *= value * rest
    tl.store(d_gate + offsets, (0.5 * d if ROOT else d).to(d_gate.dtype.element_ty), mask=mask)


def _gate_forward(gate, x, largest, root):
    y = torch.empty_like(x)
    launch(sigmoid_gate_forward_kernel, element_constants(x.numel(), LARGEST=largest, ROOT=root), gate, x, y)
    return y


def _gate_backward(gate, x, largest, root, d_y):
    d_gate, d_x = torch.empty_like(gate), torch.empty_like(x)
    constants = element_constants(x.numel(), LARGEST=largest, ROOT=root)
    launch(sigmoid_gate_backward_kernel, constants, gate, x, d_y, d_gate, d_x)
    return d_gate, d_x


_sigmoid_gate = row_operator(
    "sigmoid_gate(Tensor gate, Tensor x, float largest, bool root) -> Tensor",
    _gate_forward,
    _gate_backward,
    fake=lambda gate, x, *options: x.new_empty(x.shape),
)
