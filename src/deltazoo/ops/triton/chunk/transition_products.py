"""Products of transitions with states or other transitions, one program per tile and none that depends on another."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["X"])
def transition_product_kernel(
    a, b, added, out, X, K: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """`out = a b + added`, or `a^T b + added`; a `[n, K, K]`, the others `[n, K, X]` float32, added may be None.

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
