"""Products of transitions and states, whose bits do not depend on how many there are."""

from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.operator import Operator

__all__ = ["product", "transition_product"]


def product(a: Tensor, b: Tensor, added: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`a @ b + added` over leading dimensions, or `a^T @ b + added`.

    Args:
        a: `[..., K, K]` float32, or float64 on a CPU.
        b: `[..., K, X]`, with the leading dimensions of a.
        added: tensor of the result's shape; zero unless given.
        transposed: whether to take the transpose of a.

    Returns:
        `[..., K, X]`. On a GPU each product is computed by itself in tiles of a fixed size, in three TF32 terms.
    """
    if a.is_cuda:
        return transition_product(a, b, added, transposed)
    a = a.mT if transposed else a
    lead, (K, L), X = b.shape[:-2], a.shape[-2:], b.shape[-1]
    a, b = a.reshape(-1, K, L), b.reshape(-1, L, X)
    result = torch.bmm(a, b) if added is None else torch.baddbmm(added.reshape(-1, K, X), a, b)
    return result.view(*lead, K, X)


@triton.jit(do_not_specialize=["X"])
def transition_product_kernel(
    a, b, added, out, X, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Store `out = a b + added`, or `a^T b + added`; a `[n, K, K]`, the others `[n, K, X]` float32, added may be None.

    Sums over key channels run in tiles of BK in order, in three TF32 terms. Grid (n, X / BX, K / BK).
    """
    i_n = tl.program_id(0).to(tl.int64)
    o_x, o_k, o_c = tl.program_id(1) * BX + tl.arange(0, BX), tl.program_id(2) * BK + tl.arange(0, BK), tl.arange(0, BK)
    m_out = (o_k < K)[:, None] & (o_x < X)[None, :]
    o_out = i_n * K * X + o_k[:, None] * X + o_x[None, :]
    tile = tl.zeros([BK, BX], dtype=tl.float32)
    if added is not None:
        tile = tl.load(added + o_out, mask=m_out, other=0.0)
    for start in tl.static_range(0, K, BK):
        c = start + o_c
        o_a = c[None, :] * K + o_k[:, None] if TRANSPOSED else o_k[:, None] * K + c[None, :]
        left = tl.load(a + i_n * K * K + o_a, mask=(o_k < K)[:, None] & (c < K)[None, :], other=0.0)
        m_b = (c < K)[:, None] & (o_x < X)[None, :]
        right = tl.load(b + i_n * K * X + c[:, None] * X + o_x[None, :], mask=m_b, other=0.0)
        tile = tl.dot(left, right, tile, input_precision="tf32x3")
    tl.store(out + o_out, tile, mask=m_out)


@lru_cache(maxsize=1024)
def _constants(n: int, K: int, X: int, transposed: bool) -> Constants:
    BK, BX = min(64, max(16, triton.next_power_of_2(K))), min(32, max(16, triton.next_power_of_2(X)))
    return Constants(
        n, -(-X // BX), -(-K // BK), X=X, K=K, BK=BK, BX=BX, TRANSPOSED=transposed, num_warps=4, num_stages=2
    )  # fmt: skip


def _launch(a, b, added, transposed):
    a, b, added = a.contiguous(), b.contiguous(), None if added is None else added.contiguous()
    out = torch.empty_like(b)
    K, X = b.shape[-2:]
    launch(transition_product_kernel, _constants(b.numel() // (K * X), K, X, transposed), a, b, added, out)
    return out


transition_product = Operator(
    "transition_product(Tensor a, Tensor b, Tensor? added, bool transposed) -> Tensor",
    _launch,
    lambda a, b, added, transposed: b.new_empty(b.shape),
)
"""The operator that runs the kernel: `product` of float32 tensors."""
