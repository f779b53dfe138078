"""Products of keys in float32, in one pass over memory: their squared length, and the erase gain without its step size.

    n = sum of min(|k|, 1e15)^2      d_k = 2 d_n k, zero where |k| > 1e15
    g = e . k, which has no gradient

The backward pass keeps only the keys. The bound is that of `deltazoo.ops.step_size.gate_and_squared_norm`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.fused.kernels.rule_keys import keep_tile, key_rows, load_tile
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["erase_gain", "squared_norm"]


@triton.jit(do_not_specialize=["R"])
def squared_norm_forward_kernel(k, n, R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = tl.minimum(tl.abs(load_tile(k, rows, columns, mask, K)), 1e15)
    tl.store(n + rows, tl.sum(X * X, axis=1), mask=row_mask)


@triton.jit(do_not_specialize=["R"])
def squared_norm_backward_kernel(k, d_n, d_k, R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = load_tile(k, rows, columns, mask, K)
    d = tl.load(d_n + rows, mask=row_mask, other=0.0)
    keep_tile(d_k, tl.where(tl.abs(X) <= 1e15, 2 * d[:, None] * X, 0.0), rows, columns, mask, K)


@triton.jit(do_not_specialize=["R"])
def erase_gain_kernel(k, erase_key, gain, R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    products = load_tile(k, rows, columns, mask, K) * load_tile(erase_key, rows, columns, mask, K)
    tl.store(gain + rows, tl.sum(products, axis=1), mask=row_mask)


@lru_cache(maxsize=1024)
def _constants(R: int, K: int) -> Constants:
    programs, tile = row_blocks(R, K)
    return Constants(programs, R=R, K=K, **tile, num_warps=8)


def _forward(k):
    k, K = k.contiguous(), k.shape[-1]
    n = k.new_empty(k.shape[:-1], dtype=torch.float32)
    with torch.cuda.device_of(k):
        launch(squared_norm_forward_kernel, _constants(n.numel(), K), k, n)
    return n


def _backward(k, d_n):
    k, d_n = k.contiguous(), d_n.contiguous()
    d_k = torch.empty_like(k)
    with torch.cuda.device_of(k):
        launch(squared_norm_backward_kernel, _constants(d_n.numel(), k.shape[-1]), k, d_n, d_k)
    return d_k


def _gain(k, erase_key):
    k, erase_key = k.contiguous(), erase_key.contiguous()
    gain = k.new_empty(k.shape[:-1], dtype=torch.float32)
    with torch.cuda.device_of(k):
        launch(erase_gain_kernel, _constants(gain.numel(), k.shape[-1]), k, erase_key, gain)
    return gain


squared_norm = DifferentiableOperator(
    "squared_norm(Tensor k) -> Tensor",
    _forward,
    fake=lambda k: k.new_empty(k.shape[:-1], dtype=torch.float32),
    backward=Operator(
        "squared_norm_backward(Tensor k, Tensor d_n) -> Tensor",
        _backward,
    ),
    refusal=REFUSAL,
)
"""`squared_norm(k)`, see `deltazoo.ops.fused.fused_squared_norm`."""

erase_gain = Operator(
    "erase_gain(Tensor k, Tensor erase_key) -> Tensor",
    _gain,
    fake=lambda k, erase_key: k.new_empty(k.shape[:-1], dtype=torch.float32),
)
"""`erase_gain(k, erase_key)`, see `deltazoo.ops.fused.fused_erase_gain`."""
