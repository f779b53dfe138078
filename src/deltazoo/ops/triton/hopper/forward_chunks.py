"""The parts of a chunk that the fused forward pass computes without its state: P, T11, T22 and -L21.

If the backward pass follows, step sizes are factors of L, A stands in place of T, and A and P go to memory, too.

A warp has 16 rows of every matrix of the chunk. The inverse of its diagonal block of 16 tokens comes from substitution
in float32, where a lane has one column; then each pair of warps joins its two blocks with products in bfloat16, inside
the warps. The blocks are rounded before these products, as are those that multiply the state: so the joined
block fits them, and one key repeated errs less than with products in higher precision (docs/log.md).
"""

from deltazoo.ops.triton.chunk.inverse import MAX_FAST_GAIN
from deltazoo.ops.triton.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    mma_v2,
    reinterpret,
    tma,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.decayed_keys import RANGE, decay_keys
from deltazoo.ops.triton.hopper.scan import C

# Vectors of C numbers per chunk in `factors`: exp(G), exp(G_last - G), exp(G_last), G in log2, the step sizes, and
# exp(G) times the scale of q.
SINCE_START = gl.constexpr(0)
TO_END = gl.constexpr(1)
TOTAL = gl.constexpr(2)
LOG2_DECAY = gl.constexpr(3)
STEP = gl.constexpr(4)
OUTPUT = gl.constexpr(5)
VECTORS = gl.constexpr(6)


@jit
def halves(x, N: gl.constexpr):
    """Left and right half of the N columns of a matrix of C rows."""
    return gl.split(x.reshape([C, 2, N // 2]).permute((0, 2, 1)))


@jit
def _split4(x):
    """The four columns of x `[4, 4]`."""
    even, odd = gl.split(x.reshape([4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@jit
def _split16(x):
    """The sixteen columns of x `[4, 16]`."""
    even, odd = gl.split(x.reshape([4, 8, 2]))
    even, next_even = gl.split(even.reshape([4, 4, 2]))
    odd, next_odd = gl.split(odd.reshape([4, 4, 2]))
    x0, x4, x8, x12 = _split4(even)
    x1, x5, x9, x13 = _split4(odd)
    x2, x6, x10, x14 = _split4(next_even)
    x3, x7, x11, x15 = _split4(next_odd)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@jit
def _twice(x, LAYOUT: gl.constexpr):
    """x `[2, 16, 16]` as `[4, 16, 16]`, each block twice."""
    return (x[:, None, :, :] + gl.full([2, 2, 16, 16], 0.0, x.dtype, LAYOUT)).reshape([4, 16, 16])


@jit
def prepare_chunks(
    chunks, DECAY: gl.constexpr, BY_GAIN: gl.constexpr, KEEP: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr
):
    """Compute P, T11, T22 and -L21 of every chunk, and whether its largest gain is too large, by four warps."""
    rings, channel, bars, prepared, factors, large, scratch, kept, large_gain, scale, NC = chunks
    q_ring, k_ring, _ = rings
    written_ring, entries, totals, gates, gates_full, gates_empty, fewest = channel
    full, _ = bars
    T_ring, L_ring, P_ring, ready = prepared
    diagonal, inverses, gains, order = scratch
    AP_tiles, A_buffer, P_buffer, corner, slot, HV = kept
    DTYPE: gl.constexpr = T_ring.dtype
    # Every warp has 16 rows in all of these layouts.
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    # Layouts of four blocks of 16 x 16, one per warp, for products within the warps.
    BLOCKS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 2)
    # RIGHT as [pair of blocks, block of the pair, row, column]
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 8, 0], [0, 0, 0, 8]],
        [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 1, 0, 0], [1, 0, 0, 0]], [], [2, 2, 16, 16],
    )  # fmt: skip
    # In the substitution a warp has one block, a lane one column of its inverse (twice), and one row after another.
    COLUMN: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 0]], [[1, 0], [2, 0]], [], [4, 16]
    )
    FACTORS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]], [[1, 0], [2, 0]], [], [4, 4]
    )
    STEPS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]], [[1, 0], [2, 0]], [], [4, 16]
    )
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.full([C, C], 0.0, gl.float32, SQUARE)
    none = gl.full([C, 32], 0.0, gl.float32, PAIR)
    upper = gl.arange(0, C, gl.SliceLayout(1, PAIR))[:, None] < 32
    no_block = gl.full([4, 16, 16], 0.0, gl.float32, BLOCKS)
    warp = gl.arange(0, C, gl.SliceLayout(1, BLOCK))[:, None] // 16
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    identity = gl.where((o_i == o_j) & (block >= 0), 1.0, 0.0)
    odd = (block % 2 == 1) & (o_i >= 0) & (o_j >= 0)
    o_x = gl.arange(0, 16, gl.SliceLayout(0, COLUMN))[None, :] + gl.full([4, 1], 0, gl.int32, COLUMN)
    # Rows of all blocks, the blocks side by side.
    rows = reinterpret(diagonal, gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    even_inverses = reinterpret(inverses, DTYPE, [2, 32, 16], inverses.layout).slice(0, 16, dim=1)
    c = 0
    end = NC
    while c < end:
        stage = c % STAGES
        vectors = stage * VECTORS
        k, q = k_ring.index(stage), q_ring.index(stage)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        written = written_ring.index(stage) if DECAY == "channel" else k
        if DECAY == "channel":
            mbarrier.wait(gates_full.index(0), c & 1)
            entry, total = entries.index(stage), totals.index(stage)
            total_before = totals.index((c + STAGES - 1) % STAGES)
            decay_keys(q, k, written, gates, total_before, entry, total, fewest)
            fence_async_shared()
            barrier()
            mbarrier.arrive(gates_empty.index(0), count=1)
        L = warpgroup_mma(k, written.permute((1, 0)), zero, use_acc=False, is_async=True)
        # exp(G_i - G_j) on and below the diagonal, 0 above it. `order` holds i * 2^30. As comparisons of indices the
        # masks would stay in registers from chunk to chunk, 64 packed predicates (docs/log.md).
        if DECAY == "scalar":
            i_row, i_column = order.load(gl.SliceLayout(1, SQUARE)), order.load(gl.SliceLayout(0, SQUARE))
            G = factors.index(vectors + LOG2_DECAY)
            G_row, G_column = G.load(gl.SliceLayout(1, SQUARE)), G.load(gl.SliceLayout(0, SQUARE))
            E = gl.exp2(gl.minimum(G_row[:, None] - G_column[None, :], i_row[:, None] - i_column[None, :]))
        L = -warpgroup_mma_wait(0, deps=[L])
        if DECAY == "scalar":
            L = L * E
        if KEEP:
            L = L * factors.index(vectors + STEP).load(gl.SliceLayout(1, SQUARE))[:, None]
            tma.store_wait(0)  # waits for the store of the chunk before
            barrier()
        left, right = halves(L, C)
        B0, B1 = halves(left, 32)
        B2, B3 = halves(right, 32)
        B0, B1 = gl.convert_layout(B0, BLOCK), gl.convert_layout(B1, BLOCK)
        B2, B3 = gl.convert_layout(B2, BLOCK), gl.convert_layout(B3, BLOCK)
        own = gl.where(warp == 0, B0, gl.where(warp == 1, B1, gl.where(warp == 2, B2, B3)))
        # -L of the block to the left; even warps have none in their pair and do not use it
        below = gl.convert_layout(gl.where(warp < 2, B0, B2).to(DTYPE).reshape([4, 16, 16]), RIGHT)
        diagonal.store(own.reshape([4, 16, 16]).permute((1, 0, 2)).reshape([C, 16]))
        L_ring.index(stage).store(gl.convert_layout(left.to(DTYPE), PAIR))
        if QUERIES:
            P = warpgroup_mma(q, written.permute((1, 0)), zero, use_acc=False, is_async=True)
            P = warpgroup_mma_wait(0, deps=[P])
            if DECAY == "scalar":
                P = P * (E * scale)
            else:
                i_row, i_column = order.load(gl.SliceLayout(1, SQUARE)), order.load(gl.SliceLayout(0, SQUARE))
                P = gl.where(i_row[:, None] >= i_column[None, :], P, 0.0)
            P_ring.index(stage).store(P.to(DTYPE))
            if KEEP:
                P_buffer.permute((1, 0)).store((P if DECAY == "scalar" else P * scale).to(DTYPE))
        # Rows of (1 / beta - L)^-1 from the first to the last: b_r (e_r + sum_n -L_rn x_n); A has no b_r.
        steps = _split16(factors.index(vectors + STEP).reshape([4, 16]).load(STEPS))
        least = gl.full([4], 0.0, gl.float32, gl.SliceLayout(1, COLUMN))  # minus the largest gain of each block
        xs = ()
        for r in gl.static_range(16):
            x = gl.where(o_x == r, 1.0, 0.0)
            step = gl.convert_layout(steps[r], gl.SliceLayout(1, COLUMN))
            for m in gl.static_range(r // 4 + 1):
                row = _split4(rows.index(r).slice(4 * m, 4, dim=1).load(FACTORS))
                for n in gl.static_range(4):
                    factor = gl.convert_layout(row[n], gl.SliceLayout(1, COLUMN))
                    if 4 * m + n < r:
                        x += factor[:, None] * xs[4 * m + n]
                    if BY_GAIN and 4 * m + n == r:
                        least = gl.minimum(least, factor if KEEP else factor * step)
            xs += (x if KEEP else x * step[:, None],)
        x8 = ()
        for n in gl.static_range(8):
            x8 += (gl.join(xs[n], xs[n + 8]),)
        x4 = ()
        for n in gl.static_range(4):
            x4 += (gl.join(x8[n], x8[n + 4]),)
        X = gl.join(gl.join(x4[0], x4[2]), gl.join(x4[1], x4[3]))  # [block, column, the four bits of the row]
        inverses.store(X.reshape([4, 16, 16]).to(DTYPE))
        if BY_GAIN:
            gains.store(least)
        # Blocks [D0, D1] of a pair: T = [[D0, 0], [-D1 L D0, D1]]. Even warps have D0 in place of the product.
        X = inverses.permute((0, 2, 1)).load(LEFT)
        if BY_GAIN or DECAY == "channel":  # found here, it hides behind the products
            is_large = gl.to_tensor(False)
            if BY_GAIN:
                is_large = gl.min(gains.load(gl.BlockedLayout([4], [32], [4], [0])), 0) < -MAX_FAST_GAIN
            if DECAY == "channel":
                is_large |= gl.min(fewest.load(gl.BlockedLayout([4], [32], [4], [0])), 0) < -2 * RANGE
            large.index(stage).store(gl.full([1], 0, gl.int32, SPREAD) + is_large.to(gl.int32))
        even = even_inverses.permute((0, 2, 1)).load(gl.SliceLayout(1, PAIRS))
        even = gl.convert_layout(_twice(even, PAIRS), RIGHT)
        Z = mma_v2(X, below, no_block)
        Z = gl.where(odd, Z, identity).to(DTYPE)
        first = mma_v2(gl.convert_layout(Z, LEFT), even, no_block).to(DTYPE)
        X = gl.convert_layout(X, BLOCKS)
        second = gl.where(odd, X, no_block.to(DTYPE))
        T = gl.join(first, second).permute((0, 1, 3, 2)).reshape([C, 32])
        T = gl.convert_layout(T, PAIR)
        T_ring.index(stage).store(T)
        if KEEP:  # the last block, A22 (-L21 A11); the first 32 of 64 rows in these products have no meaning
            fence_async_shared()
            barrier()
            first_rows = T_ring.index(stage).slice(0, 32, dim=0)
            M = warpgroup_mma(L_ring.index(stage), first_rows, none, use_acc=False, is_async=True)
            M = warpgroup_mma_wait(0, deps=[M])
            corner.store(M.to(DTYPE))
            fence_async_shared()
            barrier()
            last_rows = corner.slice(32, 32, dim=0)
            M = warpgroup_mma(T_ring.index(stage), last_rows, none, use_acc=False, is_async=True)
            M = warpgroup_mma_wait(0, deps=[M])
            A = A_buffer.permute((1, 0))
            A.slice(0, 32, dim=1).store(gl.where(upper, T, M.to(DTYPE)))
            A.slice(32, 32, dim=1).store(gl.where(upper, none.to(DTYPE), T))
        if BY_GAIN or DECAY == "channel":
            if is_large:  # the state passes this chunk unchanged
                T_ring.index(stage).store(gl.full([C, 32], 0.0, DTYPE, PAIR))
                if DECAY == "scalar":
                    factors.index(vectors + TOTAL).store(gl.full([C], 1.0, gl.float32, SPREAD))
                if DECAY == "channel":
                    entry.store(total_before.load(SPREAD))
                    total.store(gl.full([2 * C], 1.0, gl.float32, SPREAD))
                end = 0
        fence_async_shared()  # orders T, L and P of every thread that wrote them
        barrier()  # ... before the arrival, which one thread makes for all
        mbarrier.arrive(ready.index(stage), count=1)
        if KEEP:
            row = (slot + c * HV) * (2 * C)
            tma_store(AP_tiles, [row, 0], A_buffer)
            if QUERIES:
                tma_store(AP_tiles, [row + C, 0], P_buffer)
        c += 1
    if large_gain is not None:
        begin = gl.where(end < c, c - 1, NC)
        o_c = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        for start in range(0, NC, 128):
            chunk = start + o_c
            gl.store(large_gain + slot + chunk * HV, (chunk >= begin).to(gl.int32), mask=chunk < NC)
    if KEEP:
        tma.store_wait(0)
