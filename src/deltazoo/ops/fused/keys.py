"""Keys that rules compute from queries and keys, and products of keys, each in one pass over memory.

    q_delta_key    "query_share"    e = k + s q,      s = sigmoid(gate - 0.9) per head
    qed_key        "gated_query"    e = b k + s (b q - (b q . k) k),   b = L sigmoid(gate) per channel,
                                    s = sigmoid(theta) / 4
    comba_keys     "feedback"       q' = q - d k,      e = c k,      c = sigmoid(decay)
                   "unit_feedback"  the L2 norms of q - d c k, of k and of c k
    squared_norm   n = sum of min(|k|, 1e15)^2      d_k = 2 d_n k, zero where |k| > 1e15
    erase_gain     g = e . k, which has no gradient

theta, decay and d are one number per key head; a kernel calls the first of a rule's numbers p0, the second p1. The
backward passes keep only the inputs, and leave the gradients of p0 and p1 per row, for torch to sum.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.device_math import logistic
from deltazoo.ops.fused.norms import l2_norm
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_blocks, row_operator
from deltazoo.ops.operator import Operator
from deltazoo.ops.recompute import recomputable


def q_delta_key(gate: Tensor, q: Tensor, k: Tensor, *, fused: bool | None = None) -> Tensor:
    """The erase key of Q-Delta, `k + sigmoid(gate - 0.9) q`, computed in float32 and rounded once.

    Args:
        gate: `[B, T, H]`, before its sigmoid.
        q, k: `[B, T, H, K]` of one dtype.

    Returns:
        `[B, T, H, K]` in k's dtype; the backward pass keeps only the inputs, here and for the other keys.

    Raises:
        ValueError: shapes that do not fit each other for a kernel, here and for the other keys.
    """
    if _takes_kernel(fused, q, k, gate):
        return recomputable(_made, "query_share", q, k, gate)[2]
    return recomputable(_q_delta_key, gate, q, k)


def _q_delta_key(gate: Tensor, q: Tensor, k: Tensor) -> Tensor:
    share = torch.sigmoid(at_least_float32(gate) - 0.9)[..., None]
    return (at_least_float32(k) + share * q).to(k.dtype)


def qed_key(
    gate: Tensor, q: Tensor, k: Tensor, theta: Tensor, largest: float = 1.0, *, fused: bool | None = None
) -> Tensor:
    """The erase key of QED, `b * k + s (I - k k^T) (b * q)`, computed in float32 and rounded once.

    Args:
        gate: `[B, T, H, K]`, before its sigmoid.
        q, k: `[B, T, H, K]` of one dtype.
        theta: `[H]`.
        largest: upper end of b.

    Returns:
        `[B, T, H, K]` in k's dtype.
    """
    if _takes_kernel(fused, q, k, gate, theta):
        return recomputable(_made, "gated_query", q, k, gate, theta, None, largest)[2]
    return recomputable(_qed_key, gate, q, k, theta, largest)


def _qed_key(gate: Tensor, q: Tensor, k: Tensor, theta: Tensor, largest: float) -> Tensor:
    b = largest * torch.sigmoid(at_least_float32(gate))
    share = 0.25 * torch.sigmoid(theta.to(b.dtype))[:, None]
    key, gated_query = k.to(b.dtype), b * q
    along_key = (key * gated_query).sum(-1, keepdim=True)
    return (b * key + share * (gated_query - along_key * key)).to(k.dtype)


def comba_keys(
    q: Tensor, k: Tensor, decay: Tensor, D: Tensor, *, unit: bool = False, fused: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, write key and erase key of Comba: `q - d k`, `k` and `c k`, computed in float32 and rounded once.

    Args:
        q, k: `[B, T, H, K]` of one dtype.
        decay: `[H]`, c before its sigmoid.
        D: `[H]`, d.
        unit: whether all three are divided by their L2 norms; the query then is `q - d c k`.

    Returns:
        Three `[B, T, H, K]` in the dtype of q and k; without `unit` the write key is k itself.
    """
    if _takes_kernel(fused, q, k, decay, D):
        return recomputable(_made, "unit_feedback" if unit else "feedback", q, k, None, decay, D)
    return recomputable(_comba_keys, q, k, decay, D, unit)


def _comba_keys(q: Tensor, k: Tensor, decay: Tensor, D: Tensor, unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    key = at_least_float32(k)
    c, d = torch.sigmoid(decay.to(key.dtype))[:, None], D.to(key.dtype)[:, None]
    if not unit:
        return (q - d * key).to(q.dtype), k, (c * key).to(k.dtype)
    normed = partial(l2_norm, fused=False)
    return normed(q - d * c * key).to(q.dtype), normed(k), normed(c * key).to(k.dtype)


def squared_norm(k: Tensor, *, fused: bool | None = None) -> Tensor:
    """`|k|^2` over the last axis `[..., K]`, float32 (float64 stays); elements beyond 1e15 count as 1e15.

    The square of an absurdly large key would overflow float32. With the cut before squaring, step sizes computed from
    it and their gradients stay finite.
    """
    if takes_kernel(fused, k, columns=k.shape[-1]):
        return _squared_norm(k)
    return at_least_float32(k).clamp(-1e15, 1e15).square().sum(-1)


def erase_gain(k: Tensor, erase_key: Tensor, *, fused: bool | None = None) -> Tensor:
    """`e . k` over the last axis `[..., K]`, float32 (float64 stays); the kernel has no gradient.

    Raises:
        ValueError: tensors of two dtypes or shapes for a kernel.
    """
    if not takes_kernel(fused, k, erase_key, columns=k.shape[-1]):
        return (at_least_float32(k) * at_least_float32(erase_key)).sum(-1)
    if (k.dtype, k.shape) != (erase_key.dtype, erase_key.shape):
        raise ValueError(
            f"k and erase_key must be alike, got {k.dtype} {tuple(k.shape)} and {erase_key.dtype} "
            f"{tuple(erase_key.shape)}"
        )
    return _erase_gain(k.detach(), erase_key.detach())


def _takes_kernel(fused: bool | None, q: Tensor, k: Tensor, *others: Tensor) -> bool:
    return takes_kernel(fused, k, q, *others, columns=k.shape[-1])


def _made(
    keys: str,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    p0: Tensor | None = None,
    p1: Tensor | None = None,
    largest: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, write key and erase key, computed by the kernel; unchanged ones are the arguments themselves.

    The gate is `[B, T, H]` for "query_share", else `[B, T, H, K]`.
    """
    parameters = [x for x in (p0, p1) if x is not None]
    fits = q.ndim == 4 and (q.shape, q.dtype) == (k.shape, k.dtype)
    fits = fits and (gate is None or gate.shape == q.shape[: 3 if keys == "query_share" else 4])
    if not fits or any(x.shape != q.shape[2:3] for x in parameters):
        shapes = [None if x is None else tuple(x.shape) for x in (q, k, gate, *parameters)]
        number = len(parameters)
        raise ValueError(f"{keys!r} takes q and k [B, T, H, K], its gate and {number} parameters [H], got {shapes}")
    new_q, new_k, erase_key = _rule_keys(q, k, gate, p0, p1, keys, largest)
    return q if new_q is None else new_q, k if new_k is None else new_k, erase_key


@triton.jit
def key_rows(R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows and columns of a program's tile, and the masks of rows and of elements."""
    rows, columns = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    return rows, columns, rows < R, (rows < R)[:, None] & (columns < K)[None, :]


@triton.jit
def load_tile(x, rows, columns, mask, K: tl.constexpr):
    """Rows of K columns of x, in float32."""
    return tl.load(x + rows[:, None] * K + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def keep_tile(x, value, rows, columns, mask, K: tl.constexpr):
    """Store rows of K columns in x's dtype."""
    tl.store(x + rows[:, None] * K + columns[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def number_of_heads(p, rows, H: tl.constexpr):
    """The number of the head of each row `[B, T, H]`, as a column."""
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
    """The gradient of x, if d is that of x divided by its L2 norm."""
    inverse = _inverse_norm(x)
    return inverse * (d - x * (inverse * inverse * _dot(d, x)))


@triton.jit(do_not_specialize=["R"])
def rule_keys_backward_kernel(q, k, gate, p0, p1, d_new_q, d_new_k, d_e, d_q, d_k, d_gate, terms, R,
                              KEYS: tl.constexpr, LARGEST: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                              BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """`terms [2, R]`: each row's part of the gradients of p0 and p1."""
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
def key_constants(shape: torch.Size, **named: Any) -> Constants:
    """Grid and constants of kernels over keys `[..., K]` of a shape; `named` constants are added."""
    R, K = shape[:-1].numel(), shape[-1]
    programs, tile = row_blocks(R, K)
    return Constants(programs, R=R, K=K, **tile, **named, num_warps=8)


def _keys_forward(q, k, gate, p0, p1, keys, largest):
    new_q = torch.empty_like(q) if keys in ("feedback", "unit_feedback") else None
    new_k = torch.empty_like(k) if keys == "unit_feedback" else None
    e = torch.empty_like(k)
    constants = key_constants(k.shape, H=k.shape[-2], KEYS=keys, LARGEST=largest)
    launch(rule_keys_forward_kernel, constants, q, k, gate, p0, p1, new_q, new_k, e)
    return new_q, new_k, e


def _keys_backward(q, k, gate, p0, p1, keys, largest, d_new_q, d_new_k, d_e):
    d_q, d_k, d_gate = torch.empty_like(q), torch.empty_like(k), None if gate is None else torch.empty_like(gate)
    H = k.shape[-2]
    parameters = [p for p in (p0, p1) if p is not None]
    terms = q.new_empty(len(parameters), *k.shape[:-1], dtype=torch.float32)
    constants = key_constants(k.shape, H=H, KEYS=keys, LARGEST=largest)
    launch(rule_keys_backward_kernel, constants, q, k, gate, p0, p1, d_new_q, d_new_k, d_e, d_q, d_k, d_gate, terms)
    d_p = [part.view(-1, H).sum(0).to(p.dtype) for part, p in zip(terms, parameters, strict=True)]
    return d_q, d_k, d_gate, *d_p, *[None] * (2 - len(d_p))


_ARGUMENTS = "Tensor q, Tensor k, Tensor? gate, Tensor? p0, Tensor? p1, str keys, float largest"


def _fake(q, k, gate, p0, p1, keys, largest):
    new_q = q.new_empty(q.shape) if keys in ("feedback", "unit_feedback") else None
    return new_q, k.new_empty(k.shape) if keys == "unit_feedback" else None, k.new_empty(k.shape)


_rule_keys = row_operator(
    f"rule_keys({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _keys_forward,
    _keys_backward,
    fake=_fake,
    backward_schema=f"rule_keys_backward({_ARGUMENTS}, Tensor? d_new_q, Tensor? d_new_k, Tensor d_e) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""The operator that gives new query, new key (None if unchanged) and erase key."""


@triton.jit(do_not_specialize=["R"])
def key_products_kernel(k, erase_key, product, R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """`e . k`, or without erase keys `|k|^2`."""
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = load_tile(k, rows, columns, mask, K)
    if erase_key is None:
        X = tl.minimum(tl.abs(X), 1e15)
        tl.store(product + rows, tl.sum(X * X, axis=1), mask=row_mask)
    else:
        X *= load_tile(erase_key, rows, columns, mask, K)
        tl.store(product + rows, tl.sum(X, axis=1), mask=row_mask)


@triton.jit(do_not_specialize=["R"])
def squared_norm_backward_kernel(k, d_n, d_k, R, K: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    rows, columns, row_mask, mask = key_rows(R, K, BR, BD)
    X = load_tile(k, rows, columns, mask, K)
    d = tl.load(d_n + rows, mask=row_mask, other=0.0)
    keep_tile(d_k, tl.where(tl.abs(X) <= 1e15, 2 * d[:, None] * X, 0.0), rows, columns, mask, K)


def _products(k, erase_key=None):
    product = _like_heads(k)
    launch(key_products_kernel, key_constants(k.shape), k, erase_key, product)
    return product


def _norm_backward(k, d_n):
    d_k = torch.empty_like(k)
    launch(squared_norm_backward_kernel, key_constants(k.shape), k, d_n, d_k)
    return d_k


def _like_heads(k, *_):
    return k.new_empty(k.shape[:-1], dtype=torch.float32)


_squared_norm = row_operator("squared_norm(Tensor k) -> Tensor", _products, _norm_backward, fake=_like_heads)

_GAIN = "erase_gain(Tensor k, Tensor erase_key) -> Tensor"
_erase_gain = Operator(_GAIN, _products, _like_heads, contiguous=True)
