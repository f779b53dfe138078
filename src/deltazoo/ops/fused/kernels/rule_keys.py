"""Queries and erase keys of rules that make them of q and k, in one pass over memory, forward and backward.

    "query_share"    e = k + s q,      s = sigmoid(gate - 0.9) per head
    "gated_query"    e = b k + s (b q - (b q . k) k),      b = L sigmoid(gate) per channel, s = sigmoid(p0) / 4
    "feedback"       q' = q - p1 k,      e = c k,      c = sigmoid(p0)
    "unit_feedback"  the L2 norms of q - p1 c k, of k and of c k

p0 and p1 are one number per key head. The backward pass keeps only the inputs, and leaves the gradients of p0 and p1
per row, for torch to sum.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.device_math import logistic
from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.row_blocks import row_blocks
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["keep_tile", "load_tile", "number_of_heads", "rule_keys"]


@triton.jit
def key_rows(R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows and columns of a program's tile, and the masks of rows and of elements."""
    rows, columns = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    return rows, columns, rows < R, (rows < R)[:, None] & (columns < K)[None, :]


@triton.jit
def load_tile(x, rows, columns, mask, K: tl.constexpr):
    """Rows of K columns, in float32."""
    return tl.load(x + rows[:, None] * K + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def keep_tile(x, value, rows, columns, mask, K: tl.constexpr):
    """Store rows of K columns in x's dtype."""
    tl.store(x + rows[:, None] * K + columns[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def number_of_heads(p, rows, H: tl.constexpr):
    """For each row `[B, T, H]` its head's number, as a column."""
    return tl.load(p + rows % H).to(tl.float32)[:, None]


@triton.jit
def _dot(a, b):
    return tl.sum(a * b, axis=1)[:, None]


@triton.jit
def _inverse_norm(x):
    return tl.rsqrt(_dot(x, x) + 1e-6)


@triton.jit(do_not_specialize=["R"])
def rule_keys_forward_kernel(q, k, gate, p0, p1, new_q, new_k, e, R, KEYS: tl.constexpr, LARGEST: tl.constexpr,
                             H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    Q, X = load_tile(q, rows, columns, mask, K), load_tile(k, rows, columns, mask, K)
    if KEYS == "query_share":
        s, _, _ = logistic(tl.load(gate + rows, mask=row_mask, other=0.0).to(tl.float32) - 0.9)
        s = s[:, None]
        keep_tile(e, X + s * Q, rows, columns, mask, K)
    if KEYS == "gated_query":
        b, _, _ = logistic(load_tile(gate, rows, columns, mask, K))
        b *= LARGEST
        share = 0.25 * tl.sigmoid(number_of_heads(p0, rows, H))
        keep_tile(e, b * X + share * (b * Q - _dot(b * Q, X) * X), rows, columns, mask, K)
    if KEYS == "feedback":
        keep_tile(new_q, Q - number_of_heads(p1, rows, H) * X, rows, columns, mask, K)
        keep_tile(e, tl.sigmoid(number_of_heads(p0, rows, H)) * X, rows, columns, mask, K)
    if KEYS == "unit_feedback":
        c = tl.sigmoid(number_of_heads(p0, rows, H))
        y, z = Q - number_of_heads(p1, rows, H) * c * X, c * X
        keep_tile(new_q, y * _inverse_norm(y), rows, columns, mask, K)
        keep_tile(new_k, X * _inverse_norm(X), rows, columns, mask, K)
        keep_tile(e, z * _inverse_norm(z), rows, columns, mask, K)


@triton.jit
def _through_norm(x, d):
    """The gradient of x, of which the L2 norm has the gradient d."""
    inverse = _inverse_norm(x)
    return inverse * (d - x * (inverse * inverse * _dot(d, x)))


@triton.jit(do_not_specialize=["R"])
def rule_keys_backward_kernel(q, k, gate, p0, p1, d_new_q, d_new_k, d_e, d_q, d_k, d_gate, terms, R,
                              KEYS: tl.constexpr, LARGEST: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                              BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """`terms [2, R]`: what each row adds to the gradients of p0 and p1."""
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    Q, X, D = (
        load_tile(q, rows, columns, mask, K),
        load_tile(k, rows, columns, mask, K),
        load_tile(d_e, rows, columns, mask, K),
    )
    if KEYS == "query_share":
        s, rest, _ = logistic(tl.load(gate + rows, mask=row_mask, other=0.0).to(tl.float32) - 0.9)
        d_q_tile, d_k_tile = s[:, None] * D, D
        d_s = tl.sum(D * Q, axis=1) * s * rest
        tl.store(d_gate + rows, d_s.to(d_gate.dtype.element_ty), mask=row_mask)
    if KEYS == "gated_query":
        b, rest, _ = logistic(load_tile(gate, rows, columns, mask, K))
        b *= LARGEST
        share = tl.sigmoid(number_of_heads(p0, rows, H))
        x = b * Q
        along = _dot(x, X)
        d_y = 0.25 * share * D
        d_along = -_dot(d_y, X)
        d_x = d_y + d_along * X
        d_q_tile = b * d_x
        d_k_tile = b * D + d_along * x - along * d_y
        keep_tile(d_gate, (X * D + Q * d_x) * b * rest, rows, columns, mask, K)
        tl.store(terms + rows, tl.sum(D * (x - along * X) * (0.25 * share * (1 - share)), axis=1), mask=row_mask)
    if KEYS == "feedback":
        c, share = tl.sigmoid(number_of_heads(p0, rows, H)), number_of_heads(p1, rows, H)
        d_q_tile = load_tile(d_new_q, rows, columns, mask, K)
        d_k_tile = c * D - share * d_q_tile
        tl.store(terms + rows, tl.sum(D * X * (c * (1 - c)), axis=1), mask=row_mask)
        tl.store(terms + R + rows, -tl.sum(d_q_tile * X, axis=1), mask=row_mask)
    if KEYS == "unit_feedback":
        c, share = tl.sigmoid(number_of_heads(p0, rows, H)), number_of_heads(p1, rows, H)
        d_q_tile = _through_norm(Q - share * c * X, load_tile(d_new_q, rows, columns, mask, K))
        d_z = _through_norm(c * X, D)
        d_k_tile = c * d_z - share * c * d_q_tile + _through_norm(X, load_tile(d_new_k, rows, columns, mask, K))
        tl.store(terms + rows, tl.sum((d_z - share * d_q_tile) * X * (c * (1 - c)), axis=1), mask=row_mask)
        tl.store(terms + R + rows, -tl.sum(c * d_q_tile * X, axis=1), mask=row_mask)
    keep_tile(d_q, d_q_tile, rows, columns, mask, K)
    keep_tile(d_k, d_k_tile, rows, columns, mask, K)


@lru_cache(maxsize=1024)
def _constants(R: int, H: int, K: int, keys: str, largest: float) -> Constants:
    programs, tile = row_blocks(R, K)
    return Constants(programs, R=R, KEYS=keys, LARGEST=largest, H=H, K=K, **tile, num_warps=8)


def _forward(q, k, gate, p0, p1, keys, largest):
    q, k, gate, p0, p1 = (None if x is None else x.contiguous() for x in (q, k, gate, p0, p1))
    new_q = torch.empty_like(q) if keys in ("feedback", "unit_feedback") else None
    new_k = torch.empty_like(k) if keys == "unit_feedback" else None
    e = torch.empty_like(k)
    H, K = k.shape[-2:]
    constants = _constants(k.numel() // K, H, K, keys, largest)
    with torch.cuda.device_of(q):
        launch(rule_keys_forward_kernel, constants, q, k, gate, p0, p1, new_q, new_k, e)
    return new_q, new_k, e


def _backward(q, k, gate, p0, p1, keys, largest, d_new_q, d_new_k, d_e):
    given = (q, k, gate, p0, p1, d_new_q, d_new_k, d_e)
    q, k, gate, p0, p1, d_new_q, d_new_k, d_e = (None if x is None else x.contiguous() for x in given)
    d_q, d_k, d_gate = torch.empty_like(q), torch.empty_like(k), None if gate is None else torch.empty_like(gate)
    H, K = k.shape[-2:]
    R = k.numel() // K
    parameters = [p for p in (p0, p1) if p is not None]
    terms = q.new_empty(len(parameters), R, dtype=torch.float32)
    constants = _constants(R, H, K, keys, largest)
    with torch.cuda.device_of(q):
        launch(rule_keys_backward_kernel, constants, q, k, gate, p0, p1, d_new_q, d_new_k, d_e, d_q, d_k, d_gate, terms)
    d_p = [part.view(-1, H).sum(0).to(p.dtype) for part, p in zip(terms, parameters, strict=True)]
    return d_q, d_k, d_gate, *d_p, *[None] * (2 - len(d_p))


def _gradients(backward, ctx, d_new_q, d_new_k, d_e):
    tensors = ctx.saved_tensors  # read once, as activation checkpointing demands
    # A result that there is not has no gradient, or an empty one of one axis.
    given = [None if d is None or d.ndim == 1 else d for d in (d_new_q, d_new_k)]
    gradients = backward(*tensors, *ctx.options, *given, d_e)
    return *(None if x is None else d for x, d in zip(tensors, gradients, strict=True)), None, None


_ARGUMENTS = "Tensor q, Tensor k, Tensor? gate, Tensor? p0, Tensor? p1, str keys, float largest"


def _fake(q, k, gate, p0, p1, keys, largest):
    new_q = q.new_empty(q.shape) if keys in ("feedback", "unit_feedback") else None
    return new_q, k.new_empty(k.shape) if keys == "unit_feedback" else None, k.new_empty(k.shape)


rule_keys = DifferentiableOperator(
    f"rule_keys({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    fake=_fake,
    backward=Operator(
        f"rule_keys_backward({_ARGUMENTS}, Tensor? d_new_q, Tensor? d_new_k, Tensor d_e) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward,
    ),
    gradients=_gradients,
    refusal=REFUSAL,
)
"""`rule_keys(q, k, gate, p0, p1, keys, largest)` -> new query, new key (None where they stay) and erase key; see
`deltazoo.ops.fused.fused_rule_keys`."""
