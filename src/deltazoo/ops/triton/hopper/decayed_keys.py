"""Queries and keys with the decay per channel multiplied in, for the fused forward pass (`hopper_forward`).

With G the decay since the chunk's start, in log2, a query or key reads the state as `q o exp2(G)` and `k o exp2(G)`,
and a key is written as `k o exp2(-G)`. These serve the products of a chunk with itself as well as the state:

    S' = exp2(G_last) o (S + (k o exp2(-G))^T U)

so nothing else needs the decay. What is written must stay in range, so a chunk in which some channel decays by more
than `2^-RANGE` is left to other kernels (`chunk.prepare_channel`).
"""

from deltazoo.ops.triton.chunk.decay_factors import LOG2E
from deltazoo.ops.triton.hopper.gluon import gl, jit

__all__ = ["RANGE", "decay_keys"]

RANGE = gl.constexpr(96.0)
"""The largest decay of a chunk, in log2. What is written is then below 2^96, which leaves 2^31 for its sums with U."""

ROWS = gl.constexpr(16)  # tokens at a time


@jit
def _add(a, b):
    return a + b


@jit
def decay_keys(q, k, written, gates, total, fewest):
    """Replace q and k `[C, K]` in shared memory, fill `written`, and the decay of the chunk, `total [K]`. Four warps.

    `fewest [4]` becomes the least log2-decay of any channel, for each warp. Warps own channels, all tokens of them.
    """
    DTYPE: gl.constexpr = q.dtype
    C: gl.constexpr = q.shape[0]
    K: gl.constexpr = q.shape[1]
    # Two lanes four rows apart: with the swizzle they are in different banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 2], [2, 16], [1, 4], [1, 0])
    before = gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(C // ROWS):
        g = gates.slice(part * ROWS, ROWS, dim=0).load(LAYOUT).to(gl.float32) * LOG2E
        G = gl.associative_scan(g, 0, _add) + before[None, :]
        before += gl.sum(g, 0)
        decay = gl.exp2(G)
        q_rows, k_rows = q.slice(part * ROWS, ROWS, dim=0), k.slice(part * ROWS, ROWS, dim=0)
        q_rows.store((q_rows.load(LAYOUT).to(gl.float32) * decay).to(DTYPE))
        key = k_rows.load(LAYOUT).to(gl.float32)
        k_rows.store((key * decay).to(DTYPE))
        undone = gl.exp2(gl.minimum(-G, RANGE))
        written.slice(part * ROWS, ROWS, dim=0).store((key * undone).to(DTYPE))
    total.store(gl.exp2(before))
    fewest.store(gl.min(before.reshape([4, K // 4]), 1))
