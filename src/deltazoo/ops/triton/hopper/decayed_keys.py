"""Queries and keys with the decay per channel multiplied in, for the fused forward pass (`hopper.forward`).

With G the decay since the chunk's start, in log2, the state is read by `q o exp2(G - m)` and `k o exp2(G - m)`, and
`k o exp2(m - G)` is written. These serve the products of a chunk with itself as well as the state:

    S~ = exp2(m) o S    S' = exp2(G_last - m) o (S~ + (k o exp2(m - G))^T U)

so nothing else needs the decay. If a channel decays by up to `2^-RANGE` over the chunk, m is 0. If it decays by more, m
is half of that, so by rounding results of a token depend on later ones of its chunk. Other kernels process a chunk in
which some channel decays by more than twice RANGE (`chunk.prepare_channel`).
"""

from deltazoo.ops.triton.chunk.decay_factors import LOG2E
from deltazoo.ops.triton.gluon import gl, jit

RANGE = gl.constexpr(96.0)
"""The largest factor of a key, in log2. In float32 that leaves 2^31 for the sums of written keys times U."""

ROWS = gl.constexpr(16)  # tokens at a time


@jit
def add(a, b):
    """The sum of a and b, for running sums."""
    return a + b


@jit
def decay_keys(q, k, written, gates, total_before, entry, total, fewest):
    """Replace q and k `[C, K]` in shared memory, and fill `written` and the factors of the state, by four warps.

    `total [K]` are factors of the state after the chunk. Those before it are `entry [K]`, in which `total_before [K]`
    of the chunk before are contained: with two vectors to read, ptxas 13 lets all products wait for each other (C7512).
    `fewest [4]` is the least log2-decay of any channel over the chunk, for each warp. Warps own channels, all tokens of
    them.
    """
    DTYPE: gl.constexpr = q.dtype
    C: gl.constexpr = q.shape[0]
    K: gl.constexpr = q.shape[1]
    # Two lanes are four rows apart: with the swizzle they are in different banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 2], [2, 16], [1, 4], [1, 0])
    zero = gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    whole = zero
    for part in gl.static_range(C // ROWS):
        whole += gl.sum(_log2_decays(gates, part, LAYOUT), 0)
    middle = gl.where(whole >= -RANGE, 0.0, gl.maximum(gl.floor(0.5 * whole), -RANGE))
    before = zero - middle
    for part in gl.static_range(C // ROWS):
        g = _log2_decays(gates, part, LAYOUT)
        G = gl.associative_scan(g, 0, add) + before[None, :]
        before += gl.sum(g, 0)
        decay = gl.exp2(G)
        q_rows, k_rows = q.slice(part * ROWS, ROWS, dim=0), k.slice(part * ROWS, ROWS, dim=0)
        q_rows.store((q_rows.load(LAYOUT).to(gl.float32) * decay).to(DTYPE))
        key = k_rows.load(LAYOUT).to(gl.float32)
        k_rows.store((key * decay).to(DTYPE))
        undone = gl.exp2(gl.minimum(-G, RANGE))
        written.slice(part * ROWS, ROWS, dim=0).store((key * undone).to(DTYPE))
    entry.store(gl.exp2(middle) * total_before.load(gl.SliceLayout(0, LAYOUT)))
    total.store(gl.exp2(whole - middle))
    fewest.store(gl.min(whole.reshape([4, K // 4]), 1))


@jit
def _log2_decays(gates, part: gl.constexpr, LAYOUT: gl.constexpr):
    return gates.slice(part * ROWS, ROWS, dim=0).load(LAYOUT).to(gl.float32) * LOG2E
