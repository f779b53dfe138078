"""Products of transitions and states, whose bits do not depend on how many there are."""

from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.operator import Operator


def product(a: Tensor, b: Tensor, added: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`a @ b + added` over leading dimensions, or `a^T @ b + added`.

    Args:
        a: `[n, ..., K, K]` float32, or float64 on a CPU.
        b: `[n, ..., K, X]`, with the leading dimensions of a.
        added: tensor of the result's shape; zero unless given.
        transposed: whether to take the transpose of a.

    Returns:
        `[n, ..., K, X]`. On a GPU each product is computed by itself in tiles of a fixed size, in three TF32 terms.
    """
    if a.is_cuda:
        return transition_product(a, b, added, transposed)
    a = a.mT if transposed else a
    lead, (K, L), X = b.shape[:-2], a.shape[-2:], b.shape[-1]
    a, b = a.reshape(-1, K, L), b.reshape(-1, L, X)
    result = torch.bmm(a, b) if added is None else torch.baddbmm(added.reshape(-1, K, X), a, b)
    return result.view(*lead, K, X)


def pair_of_two(M: Tensor, X: Tensor, later_M: Tensor, later_X: Tensor) -> Tensor:
    """`later_M [M X] + [0 later_X]`: the pair of two neighbouring blocks side by side, `[n, ..., K, K + V]`."""
    if M.is_cuda:
        return transition_pair(M, X, later_M, later_X)
    return torch.cat([product(later_M, M), product(later_M, X, later_X)], -1)


def with_middles(M: Tensor, ends: Tensor, X: Tensor, reverse: bool) -> Tensor:
    """The state at each block's beginning and, after it, that at its middle, `M state + X` by the first half's pair.

    Args:
        M: `[n, ..., K, K]`, transitions of one half of every block.
        ends: `[n, ..., K, V]`, the states at the beginning, or with `reverse` the gradients at the end.
        X: `[n, ..., K, V]`, states or gradients of these halves.
        reverse: whether M, transposed, belongs to the second half, and the middle comes first.

    Returns:
        `[2 * n, ..., K, V]`.
    """
    if M.is_cuda:
        return transition_halves(M, ends, X, reverse)
    middles = product(M, ends, X, transposed=reverse)
    return torch.stack([middles, ends] if reverse else [ends, middles], 1).flatten(0, 1)


@triton.jit(do_not_specialize=["heads", "a_cell", "b_cell", "added_cell", "M_cell", "out_cell"])
def transition_product_kernel(
    a, b, added, M, out, out_M, copy, heads, a_cell, b_cell, added_cell, M_cell, out_cell, K: tl.constexpr,
    X: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr, ADDED_ROW: tl.constexpr, M_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Store `out = a b + added`, or `a^T b + added`; if M is given also `out_M = a M`, and in `copy`, if given, b.

    a, M and `out_M` `[n, heads, K, K]`, the others `[n, heads, K, X]`, float32. A row is ROW numbers after the row
    before, also where the next head begins, and the next of n is `cell` heads further. `out_M` and `copy` have the
    strides of `out`. Sums over key channels run in tiles of BK in order, in three TF32 terms. Grid (n * heads, X / BX,
    or with M X / BX + K / BX, K / BK).
    """
    cell, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    columns = tl.program_id(1) * BX
    o_k, o_c = tl.program_id(2) * BK + tl.arange(0, BK), tl.arange(0, BK)
    a += (cell * a_cell + head) * (K * A_ROW)
    b += (cell * b_cell + head) * (K * B_ROW)
    o_out = (cell * out_cell + head) * (K * OUT_ROW)
    b_row, width = B_ROW, X
    of_M = False
    if M is not None:
        of_M = columns >= tl.cdiv(X, BX) * BX
        if of_M:
            columns -= tl.cdiv(X, BX) * BX
            b = M + (cell * M_cell + head) * (K * M_ROW)
            b_row = M_ROW
            out, width = out_M, K
    o_x = columns + tl.arange(0, BX)
    m_out = (o_k < K)[:, None] & (o_x < width)[None, :]
    tile = tl.zeros([BK, BX], dtype=tl.float32)
    if added is not None:
        o_added = (cell * added_cell + head) * (K * ADDED_ROW) + o_k[:, None] * ADDED_ROW + o_x[None, :]
        tile = tl.load(added + o_added, mask=m_out & (of_M == 0), other=0.0)
    for start in tl.static_range(0, K, BK):
        c = start + o_c
        o_a = c[None, :] * A_ROW + o_k[:, None] if TRANSPOSED else o_k[:, None] * A_ROW + c[None, :]
        left = tl.load(a + o_a, mask=(o_k < K)[:, None] & (c < K)[None, :], other=0.0)
        m_b = (c < K)[:, None] & (o_x < width)[None, :]
        right = tl.load(b + c[:, None] * b_row + o_x[None, :], mask=m_b, other=0.0)
        tile = tl.dot(left, right, tile, input_precision="tf32x3")
    tl.store(out + o_out + o_k[:, None] * OUT_ROW + o_x[None, :], tile, mask=m_out)
    if copy is not None:
        value = tl.load(b + o_k[:, None] * b_row + o_x[None, :], mask=m_out, other=0.0)
        tl.store(copy + o_out + o_k[:, None] * OUT_ROW + o_x[None, :], value, mask=m_out)


@lru_cache(maxsize=1024)
def _constants(
    n: int, heads: int, K: int, X: int, pair: bool, transposed: bool, strides: tuple[tuple[int, int], ...]
) -> Constants:
    BK, BX = min(64, max(16, triton.next_power_of_2(K))), min(32, max(16, triton.next_power_of_2(X)))
    cells, rows = zip(*strides, strict=True)
    return Constants(
        n * heads, -(-X // BX) + (-(-K // BX) if pair else 0), -(-K // BK), heads=heads, X=X,
        **dict(zip(("a_cell", "b_cell", "added_cell", "M_cell", "out_cell"), cells, strict=True)),
        **dict(zip(("A_ROW", "B_ROW", "ADDED_ROW", "M_ROW", "OUT_ROW"), rows, strict=True)),
        K=K, BK=BK, BX=BX, TRANSPOSED=transposed, num_warps=4, num_stages=2,
    )  # fmt: skip


def _by_head(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    """x `[n, ..., K, X]` as `[n, heads, K, X]`, and the strides of cells, in heads, and of rows, in numbers."""
    if x is None:
        return None, (0, 0)
    x = x.flatten(1, -3)
    cell, head, row, one = x.stride()
    if one != 1 or head != x.shape[2] * row or cell % head:
        x = x.contiguous()
        cell, head, row, _ = x.stride()
    return x, (cell // head, row)


def _launch(
    a: Tensor, b: Tensor, added: Tensor | None, out: Tensor, transposed: bool = False, M: Tensor | None = None,
    out_M: Tensor | None = None, copy: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel once; `out_M` and `copy` have the strides of `out`, which is a view of memory in order."""
    views, strides = zip(*(_by_head(x) for x in (a, b, added, M, out)), strict=True)
    n, heads, K, X = views[1].shape
    constants = _constants(n, heads, K, X, M is not None, transposed, strides)
    launch(transition_product_kernel, constants, *views, out_M, copy)


def _product(a, b, added, transposed):
    out = torch.empty_like(b, memory_format=torch.contiguous_format)
    _launch(a, b, added, out, transposed)
    return out


def _pair(M, X, later_M, later_X):
    K = M.shape[-1]
    pair = M.new_empty(*M.shape[:-1], K + X.shape[-1])
    _launch(later_M, X, later_X, pair[..., K:], M=M, out_M=pair[..., :K])
    return pair


def _halves(M, ends, X, reverse):
    states = ends.new_empty(2 * len(ends), *ends.shape[1:])
    middles, copies = states[1 - reverse :: 2], states[int(reverse) :: 2]
    _launch(M, ends, X, middles, reverse, copy=copies)
    return states


transition_product = Operator(
    "transition_product(Tensor a, Tensor b, Tensor? added, bool transposed) -> Tensor",
    _product,
    lambda a, b, added, transposed: b.new_empty(b.shape),
)
"""The operator that runs the kernel: `product` of float32 tensors."""

transition_pair = Operator(
    "transition_pair(Tensor M, Tensor X, Tensor later_M, Tensor later_X) -> Tensor",
    _pair,
    lambda M, X, later_M, later_X: M.new_empty(*M.shape[:-1], M.shape[-1] + X.shape[-1]),
)
"""The operator that runs the kernel: `pair_of_two` of float32 tensors."""

transition_halves = Operator(
    "transition_halves(Tensor M, Tensor ends, Tensor X, bool reverse) -> Tensor",
    _halves,
    lambda M, ends, X, reverse: ends.new_empty(2 * len(ends), *ends.shape[1:]),
)
"""The operator that runs the kernel: `with_middles` of float32 tensors."""
