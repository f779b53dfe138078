"""Decay between tokens of a chunk, one per key channel, as factors that stay in the range of a dtype."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# A factor of 2^-200 is zero in float32, also behind a state of any size; a log-decay of -inf stays finite this way.
LOG2_FLOOR = tl.constexpr(-200.0)
# How far a chunk may decay, in log2, for products with `exp2(-G)` to stay in the range of a dtype. In bfloat16 that
# leaves room for keys of up to 2^11; float32 needs some for the second and third terms of its operands.
HALF_RANGE = tl.constexpr(6.0)
BFLOAT_RANGE = tl.constexpr(116.0)
FLOAT_RANGE = tl.constexpr(100.0)


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
