"""Chunk-parallel preparation: the inverse `A = (I + L)^-1` of every chunk, `L = strict_lower(diag(beta) gram(k, k))`.

One program owns one chunk of one value head. Forward substitution in float32 inside diagonal blocks of 16 tokens, then
block substitution with small tf32 products, of three terms in strict mode: so the inverse survives repeated keys with
any step size in [0, 2]. It is stored as one 16-bit term in fast mode and as two that sum to it in strict mode, since
rounding it to one is what breaks chunk kernels on repeated keys with step sizes above 1 (docs/kernels.md). The second
term takes no memory of its own: A^T is upper triangular, and has the space below its diagonal. In fast mode that space
is zero, so that strict kernels can read a chunk of either mode.

No matrix passes through memory on the way. A warp owns 16 rows of `L`, so the diagonal block that it inverts is in its
own registers, and rows reach the threads that need them by shuffles.
"""

import triton
import triton.language as tl

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head

LOG2E = tl.constexpr(1.4426950408889634)
# A factor of 2^-200 is zero in float32, also behind a state of any size; a log-decay of -inf stays finite this way.
LOG2_FLOOR = tl.constexpr(-200.0)
# How far a chunk may decay, in log2, for products with `exp2(-G)` to stay in the range of a dtype. In bfloat16 that
# leaves room for keys of up to 2^11; float32 needs some for the second and third terms of its operands.
HALF_RANGE = tl.constexpr(6.0)
BFLOAT_RANGE = tl.constexpr(116.0)
FLOAT_RANGE = tl.constexpr(100.0)
# The largest erase gain `beta |k|^2` of a chunk that fast precision is right for. Step sizes up to 1 on unit keys stay
# below: rounding to bfloat16 makes |k|^2 at most 1.004. What lies above is measured in docs/precision.md.
MAX_FAST_GAIN = tl.constexpr(1.005)


@triton.jit
def side_by_side(X, Y):
    """`[X, Y]`, two matrices of equally many columns."""
    XY = tl.permute(tl.join(X, Y), (0, 2, 1))
    return tl.reshape(XY, [X.shape[0], 2 * X.shape[1]])


@triton.jit
def halves(X):
    """Left and right half of the columns of a matrix."""
    return tl.split(tl.permute(tl.reshape(X, [X.shape[0], 2, X.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def quarters(X):
    """The columns of a matrix, in four parts."""
    left, right = halves(X)
    X0, X1 = halves(left)
    X2, X3 = halves(right)
    return X0, X1, X2, X3


@triton.jit
def round_evenly(x, DTYPE: tl.constexpr):
    """Round a float32 matrix up or down to 16 bits, by a fixed pattern, so that errors of equal entries cancel in sums.

    For one key with one step size A has equal entries along its diagonals. Rounded to the nearest, they are all off by
    the same amount, and what remains of the state after a chunk is off by 64 times as much. The pattern is an additive
    sequence modulo 1 over rows and columns, whose sums along rows, columns and diagonals stay close to their means.
    """
    r, c = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    threshold = (r * 49471 + c * 37345) & 65535
    bits = x.to(tl.int32, bitcast=True)
    if tl.float16 == DTYPE:  # 13 bits fewer than float32
        bits = (bits + (threshold >> 3)) & -8192
    else:
        bits = (bits + threshold) & -65536
    return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def rounded(x, ROUND: tl.constexpr):
    """x as a factor of a tf32 product, with ROUND to the nearest: else the matrix unit cuts it off, towards zero.

    That adds up over equal entries, to more than the rounding of A to float16 (bfloat16 has three bits fewer).
    """
    if ROUND:
        x = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return x


@triton.jit
def inverse(L, C: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """The transpose of `(I + L)^-1`, L strictly lower, in float32."""
    o_c = tl.arange(0, C)
    block = (o_c // 16)[:, None]
    L0, L1, L2, L3 = quarters(L)
    # The diagonal blocks, all four at once, `[block, row, column]`, by forward substitution. Row c of a block of D is
    # column c of the inverse of that block.
    diagonal = tl.where(block == 0, L0, tl.where(block == 1, L1, tl.where(block == 2, L2, L3)))
    diagonal = tl.reshape(diagonal, [4, 16, 16])
    o_b, o_r = tl.arange(0, 4)[:, None, None], tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    D = tl.where((o_j == 0) & (o_r == 0) & (o_b >= 0), 1.0, 0.0)
    for i in tl.static_range(1, 16):
        row = tl.gather(diagonal, tl.full([4, 16, 16], i, tl.int32), 1)
        x = tl.where(tl.arange(0, 16)[None, :] == i, 1.0, 0.0) - tl.sum(row * D, 2)
        D = tl.where(o_j == i, x[:, :, None], D)

    # Row blocks of the inverse, transposed: X_I = (E_I - sum_{J<I} L_IJ X_J) scaled by D_I from the left. R collects
    # the sums of all blocks still to come.
    by_block = tl.reshape(tl.permute(D, (1, 2, 0)), [16, 32, 2])
    even, odd = tl.split(by_block)
    _, D2 = tl.split(tl.reshape(even, [16, 16, 2]))
    D1, D3 = tl.split(tl.reshape(odd, [16, 16, 2]))
    D = tl.reshape(D, [C, 16])
    X0 = tl.where(block == 0, D, 0.0)
    R = tl.dot(rounded(X0, ROUND), tl.trans(rounded(L0, ROUND)), input_precision=PRECISION)
    _, R1, _, _ = quarters(R)
    X1 = tl.where(block == 1, D, 0.0) - tl.dot(rounded(R1, ROUND), rounded(D1, ROUND), input_precision=PRECISION)
    R = tl.dot(rounded(X1, ROUND), tl.trans(rounded(L1, ROUND)), R, input_precision=PRECISION)
    _, _, R2, _ = quarters(R)
    X2 = tl.where(block == 2, D, 0.0) - tl.dot(rounded(R2, ROUND), rounded(D2, ROUND), input_precision=PRECISION)
    R = tl.dot(rounded(X2, ROUND), tl.trans(rounded(L2, ROUND)), R, input_precision=PRECISION)
    _, _, _, R3 = quarters(R)
    X3 = tl.where(block == 3, D, 0.0) - tl.dot(rounded(R3, ROUND), rounded(D3, ROUND), input_precision=PRECISION)
    return side_by_side(side_by_side(X0, X1), side_by_side(X2, X3))


@triton.jit
def store_scores(P, AP, slot, C: tl.constexpr, HAS_BETA: tl.constexpr):
    """Store the transpose of the lower triangular P behind the space for A, if any, and zeros below it."""
    o_c = tl.arange(0, C)
    AP += slot * ((2 if HAS_BETA else 1) * C * C) + (C * C if HAS_BETA else 0)
    tl.store(AP + o_c[None, :] * C + o_c[:, None], P.to(AP.dtype.element_ty))


@triton.jit
def store_fast(L, AP, C: tl.constexpr, PRECISION: tl.constexpr):
    """Store the transposed inverse in one term."""
    o_c = tl.arange(0, C)
    X = inverse(L, C, PRECISION, AP.dtype.element_ty == tl.float16)
    if tl.float32 != AP.dtype.element_ty:
        X = round_evenly(X, AP.dtype.element_ty)
    tl.store(AP + o_c[:, None] * C + o_c[None, :], X)


@triton.jit
def store_strict(L, AP, C: tl.constexpr):
    """Store the transposed inverse in two terms, the second one mirrored below the diagonal of the first."""
    DTYPE: tl.constexpr = AP.dtype.element_ty
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    X = inverse(L, C, "tf32x3", False)
    first = X.to(DTYPE)
    second = round_evenly(X - first.to(tl.float32), DTYPE)
    tl.store(AP + row * C + column, tl.where(row > column, tl.trans(second), first))


@triton.jit
def store_inverse(
    L, gain, AP, large_gain, strict_L, slot,
    C: tl.constexpr, STRICT: tl.constexpr, BY_GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the transposed inverse of a chunk; or, if it is to be strict, L, which `invert_kernel` inverts.

    BY_GAIN the erase gain decides, and `large_gain` tells later kernels how.
    """
    o_c = tl.arange(0, C)
    o_cc = slot * (C * C) + o_c[:, None] * C + o_c[None, :]
    AP += slot * (2 * C * C)
    if BY_GAIN:
        large = gain > MAX_FAST_GAIN
        tl.store(large_gain + slot, large.to(tl.int32))
        if large:
            tl.store(strict_L + o_cc, L)
        else:
            store_fast(L, AP, C, PRECISION)
    elif STRICT:
        tl.store(strict_L + o_cc, L)
    else:
        store_fast(L, AP, C, PRECISION)


@triton.jit(do_not_specialize=["chunks", "slots"])
def invert_kernel(large_gain, strict_L, AP, chunks, slots, C: tl.constexpr):
    """Store the strict inverse of those among up to 16 neighbouring `chunks`, of `slots` in all, with a large gain.

    Without `large_gain` of all of them. A kernel of its own, since this takes more registers than the rest of the
    preparation has (docs/log.md). Grid (programs,).
    """
    start, o, o_c = tl.program_id(0).to(tl.int64) * chunks, tl.arange(0, 16), tl.arange(0, C)
    count = tl.minimum(slots - start, chunks).to(tl.int32)
    if large_gain is not None:
        large = tl.load(large_gain + start + o, mask=o < count, other=0)
        if tl.max(large, 0) == 0:
            return
    for i in tl.range(0, count, num_stages=1):
        slot = start + i
        if large_gain is None or tl.load(large_gain + slot) != 0:
            L = tl.load(strict_L + slot * (C * C) + o_c[:, None] * C + o_c[None, :])
            # Added to a product, of zeros, L is spread over the threads as `inverse` wants it.
            none = tl.zeros([C, 16], dtype=AP.dtype.element_ty)
            L = tl.dot(none, tl.trans(none), L)
            store_strict(L, AP + slot * (2 * C * C), C)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def prepare_kernel(
    q,
    k,
    beta,
    log_decay,
    AP,
    chunk_beta,
    G,
    large_gain,
    strict_L,
    cu_seqlens,
    chunk_sequence,
    chunk_offsets,
    scale,
    T,
    NT,
    H,
    HV,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr,
    STRICT: tl.constexpr,
    BY_GAIN: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A, P, step sizes and cumulative log2-decay G of one chunk; no decay or one per head. Grid (HV, NT, B)."""
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    if rows <= 0:
        if BY_GAIN:
            tl.store(large_gain + slot, 0)
        return
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_c, m_ck = o_c < rows, (o_c < rows)[:, None] & (o_k < K)[None, :]
    below, above = o_c[:, None] > o_c[None, :], o_c[:, None] < o_c[None, :]
    base = (first * H + key_head(i_h, H, HV, GROUPED)) * K
    o_qk = o_c[:, None] * (H * K) + o_k[None, :]
    b_k = tl.load(k + base + o_qk, mask=m_ck, other=0.0)
    b_q = tl.load(q + base + o_qk, mask=m_ck, other=0.0)
    if DECAY == 1:
        b_g = tl.load(log_decay + (first * HV + i_h) + o_c * HV, mask=m_c, other=0.0).to(tl.float32) * LOG2E
    if HAS_BETA:
        b_beta = tl.load(beta + (first * HV + i_h) + o_c * HV, mask=m_c, other=0.0).to(tl.float32)
    P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if DECAY == 1:
        b_G = tl.cumsum(tl.maximum(b_g, LOG2_FLOOR), 0)
        tl.store(G + slot * C + o_c, b_G)
        D = tl.exp2(b_G[:, None] - b_G[None, :])  # infinite above the diagonal, perhaps
        P *= D
    store_scores(tl.where(above, 0.0, P), AP, slot, C, HAS_BETA)
    if HAS_BETA:
        tl.store(chunk_beta + slot * C + o_c, b_beta)
        L, gain = b_beta[:, None] * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION), 0.0
        if BY_GAIN:
            gain = tl.max(tl.max(tl.where(above | below, 0.0, L), 1), 0)
        if DECAY == 1:
            L *= D
        store_inverse(tl.where(below, L, 0.0), gain, AP, large_gain, strict_L, slot, C, STRICT, BY_GAIN, PRECISION)


@triton.jit
def three_terms(x, DTYPE: tl.constexpr):
    """Float32 x as three terms of DTYPE that sum to it; float32 stays one term and two that nothing reads."""
    a = x.to(DTYPE)
    b = (x - a.to(tl.float32)).to(DTYPE)
    c = (x - a.to(tl.float32) - b.to(tl.float32)).to(DTYPE)
    return a, b, c


@triton.jit
def log2_decay(log_decay, mask):
    """The log2-decays at these addresses, bounded from below."""
    return tl.maximum(tl.load(log_decay, mask=mask, other=0.0).to(tl.float32) * LOG2E, LOG2_FLOOR)


@triton.jit
def masked_sum(mask, x, y, z):
    """`mask @ (x + y + z)`: sums of selected rows on the matrix unit, of one sign, so that no exponent loses bits."""
    M = mask.to(x.dtype)
    if x.dtype == tl.float32:
        out = tl.dot(M, x, input_precision="tf32x3")
    else:
        out = tl.dot(M, z)
        out = tl.dot(M, y, out)
        out = tl.dot(M, x, out)
    return out


@triton.jit
def undo_decay(G, DTYPE: tl.constexpr):
    """`exp2(-G)`, and which rows may use it: those with all of it in the range of DTYPE.

    G falls along a chunk, so these rows come first, and whether a row is one of them never depends on later tokens.
    """
    RANGE: tl.constexpr = HALF_RANGE if tl.float16 == DTYPE else BFLOAT_RANGE if tl.bfloat16 == DTYPE else FLOAT_RANGE
    return tl.exp2(tl.minimum(-G, RANGE)), tl.min(G, 1) >= -RANGE


@triton.jit
def decays_beyond_one_product(g_last, DTYPE: tl.constexpr):
    """Whether some channel of a chunk, given their decay over the whole chunk, leaves the range of `undo_decay`."""
    RANGE: tl.constexpr = HALF_RANGE if tl.float16 == DTYPE else BFLOAT_RANGE if tl.bfloat16 == DTYPE else FLOAT_RANGE
    return tl.min(g_last, 0) < -RANGE


@triton.jit
def level_factor(g1, g2, g3, o_c, level):
    """Decay between each row and the middle of its block of `2 << level` rows, as a factor <= 1 (g: log2-decays).

    A pair of tokens i >= j with i in the right and j in the left half meets at that middle, so the product of the two
    factors is the decay between them: no exponent is ever positive, whatever the gates are.
    """
    middle = (o_c >> (level + 1) << (level + 1)) + (1 << level) - 1
    near, far = tl.minimum(o_c, middle)[:, None], tl.maximum(o_c, middle)[:, None]
    return tl.exp2(masked_sum((o_c[None, :] > near) & (o_c[None, :] <= far), g1, g2, g3))


@triton.jit
def level_mask(o_c, level):
    """Pairs (i, j) with i in the right and j in the left half of one block of `2 << level` rows."""
    half = o_c >> level
    return ((half >> 1)[:, None] == (half >> 1)[None, :]) & (half[:, None] > half[None, :])
