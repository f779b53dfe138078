"""What stands before and after the moment of a rule that scales its write keys, each in one pass, forward and backward.

    squares = sigmoid(step) k * k
    r = log(moment + 1e-6) - log_scale      f = 1.5^(-r / (1 + |r|))      key = f k

`step` is one number per token and head, `log_scale` one per head. The backward passes keep only the inputs, and leave
the gradient of `log_scale` per row, for torch to sum. Source: arXiv:2604.21100.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.device_math import logistic
from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.fused.kernels.rule_keys import keep_tile, key_rows, load_tile, number_of_heads
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["scaled_key", "weighted_squares"]


@triton.jit(do_not_specialize=["R"])
def weighted_squares_forward_kernel(step, k, y, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                                    BD: tl.constexpr):  # fmt: skip
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = load_tile(k, rows, columns, mask, K)
    s, _, _ = logistic(tl.load(step + rows, mask=row_mask, other=0.0).to(tl.float32))
    keep_tile(y, s[:, None] * X * X, rows, columns, mask, K)


@triton.jit(do_not_specialize=["R"])
def weighted_squares_backward_kernel(step, k, d_y, d_step, d_k, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                                     BD: tl.constexpr):  # fmt: skip
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X, D = load_tile(k, rows, columns, mask, K), load_tile(d_y, rows, columns, mask, K)
    s, rest, _ = logistic(tl.load(step + rows, mask=row_mask, other=0.0).to(tl.float32))
    keep_tile(d_k, 2 * s[:, None] * X * D, rows, columns, mask, K)
    d_s = s * rest * tl.sum(X * X * D, axis=1)
    tl.store(d_step + rows, d_s.to(d_step.dtype.element_ty), mask=row_mask)


@triton.jit
def _factor(A, target):
    """f, and its derivative by r."""
    log_1_5 = 0.4054651081081644
    r = tl.log(A + 1e-6) - target
    inverse = 1 / (1 + tl.abs(r))
    f = tl.exp(-log_1_5 * r * inverse)
    return f, -log_1_5 * f * inverse * inverse


@triton.jit(do_not_specialize=["R"])
def scaled_key_forward_kernel(moment, log_scale, k, y, R, H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
                              BD: tl.constexpr):  # fmt: skip
    rows, columns, _, mask = key_rows(R, K, BR, BD)
    A, X = load_tile(moment, rows, columns, mask, K), load_tile(k, rows, columns, mask, K)
    f, _ = _factor(A, number_of_heads(log_scale, rows, H))
    keep_tile(y, f * X, rows, columns, mask, K)


@triton.jit(do_not_specialize=["R"])
def scaled_key_backward_kernel(moment, log_scale, k, d_y, d_moment, d_k, terms, R, H: tl.constexpr, K: tl.constexpr,
                               BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """`terms [R]`: what each row adds to the gradient of log_scale."""
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    A, X = load_tile(moment, rows, columns, mask, K), load_tile(k, rows, columns, mask, K)
    D = load_tile(d_y, rows, columns, mask, K)
    f, slope = _factor(A, number_of_heads(log_scale, rows, H))
    keep_tile(d_k, f * D, rows, columns, mask, K)
    d_r = D * X * slope
    keep_tile(d_moment, d_r / (A + 1e-6), rows, columns, mask, K)
    tl.store(terms + rows, -tl.sum(d_r, axis=1), mask=row_mask)


@lru_cache(maxsize=1024)
def _constants(R: int, H: int, K: int) -> Constants:
    programs, tile = row_blocks(R, K)
    return Constants(programs, R=R, H=H, K=K, **tile, num_warps=8)


def _constants_of(k):
    H, K = k.shape[-2:]
    return _constants(k.numel() // K, H, K)


def _squares_forward(step, k):
    step, k = step.contiguous(), k.contiguous()
    y = torch.empty_like(k, dtype=torch.float32)
    with torch.cuda.device_of(k):
        launch(weighted_squares_forward_kernel, _constants_of(k), step, k, y)
    return y


def _squares_backward(step, k, d_y):
    step, k, d_y = step.contiguous(), k.contiguous(), d_y.contiguous()
    d_step, d_k = torch.empty_like(step), torch.empty_like(k)
    with torch.cuda.device_of(k):
        launch(weighted_squares_backward_kernel, _constants_of(k), step, k, d_y, d_step, d_k)
    return d_step, d_k


def _scaled_forward(moment, log_scale, k):
    moment, log_scale, k = moment.contiguous(), log_scale.contiguous(), k.contiguous()
    y = torch.empty_like(k)
    with torch.cuda.device_of(k):
        launch(scaled_key_forward_kernel, _constants_of(k), moment, log_scale, k, y)
    return y


def _scaled_backward(moment, log_scale, k, d_y):
    moment, log_scale, k, d_y = (x.contiguous() for x in (moment, log_scale, k, d_y))
    d_moment, d_k = torch.empty_like(moment), torch.empty_like(k)
    terms = moment.new_empty(k.shape[:-1], dtype=torch.float32)
    with torch.cuda.device_of(k):
        launch(scaled_key_backward_kernel, _constants_of(k), moment, log_scale, k, d_y, d_moment, d_k, terms)
    return d_moment, terms.flatten(0, -2).sum(0).to(log_scale.dtype), d_k


weighted_squares = DifferentiableOperator(
    "weighted_squares(Tensor step, Tensor k) -> Tensor",
    _squares_forward,
    fake=lambda step, k: k.new_empty(k.shape, dtype=torch.float32),
    backward=Operator(
        "weighted_squares_backward(Tensor step, Tensor k, Tensor d_y) -> (Tensor, Tensor)",
        _squares_backward,
    ),
    refusal=REFUSAL,
)
"""`weighted_squares(step, k)`, see `deltazoo.ops.fused.fused_weighted_squares`."""

scaled_key = DifferentiableOperator(
    "scaled_key(Tensor moment, Tensor log_scale, Tensor k) -> Tensor",
    _scaled_forward,
    fake=lambda moment, log_scale, k: k.new_empty(k.shape),
    backward=Operator(
        "scaled_key_backward(Tensor moment, Tensor log_scale, Tensor k, Tensor d_y) -> (Tensor, Tensor, Tensor)",
        _scaled_backward,
    ),
    refusal=REFUSAL,
)
"""`scaled_key(moment, log_scale, k)`, see `deltazoo.ops.fused.fused_scaled_key`."""
