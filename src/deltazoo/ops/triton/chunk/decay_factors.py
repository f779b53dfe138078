"""Decay between tokens of a chunk, one per key channel, as factors in the range of a dtype; sums of log-decays over
tokens on the matrix unit.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-200 is zero in float32, so such a decay clears a state of any size; the bound keeps a log-decay of -inf finite.
LOG2_FLOOR = tl.constexpr(-200.0)


@triton.constexpr_function
def exponent_range(dtype):
    """The decay of a chunk, in log2, up to which products with `exp2(-G)` stay in the range of a dtype.

    In bfloat16 that allows keys of up to 2^11; float32 keeps a margin for the second and third terms of its operands.
    """
    return 6.0 if dtype == tl.float16 else 116.0 if dtype == tl.bfloat16 else 100.0


@triton.jit
def log2_decay(log_decay, mask):
    """The log2-decays at these addresses, bounded from below."""
    return tl.maximum(tl.load(log_decay, mask=mask, other=0.0).to(tl.float32) * LOG2E, LOG2_FLOOR)


@triton.constexpr_function
def centred_range(dtype):
    """The decay of a chunk, in log2, up to which factors from and to `middle_of` stay in range.

    In bfloat16 each factor is then within 2^96, which leaves 2^30 for the other operand: gradients of a mean over many
    tokens are small. Float32 gradients take other factors (`gradients_levels.py`).
    """
    return 12.0 if dtype == tl.float16 else 192.0 if dtype == tl.bfloat16 else exponent_range(dtype)


@triton.jit
def decays_beyond(g_last, RANGE: tl.constexpr):
    """Whether the decay of some channel over the chunk, `g_last [runs, channels]`, leaves this range, in log2."""
    return tl.min(tl.min(g_last, 1), 0) < -RANGE


@triton.jit
def middle_of(g_last):
    """A whole number near half the decay of a chunk, for each channel.

    `exp2(G - middle)` and `exp2(middle - G)` are in range for twice the decay of `exp2(G)` and `exp2(-G)`.
    `prepare_channel_kernel` does not use it, since results of a token would depend on later ones by their rounding.
    """
    return tl.floor(0.5 * g_last)


@triton.jit
def two_terms(x, DTYPE: tl.constexpr):
    """Float32 x as two terms of 16 bits whose sum differs from it by 2^-17 of it."""
    if tl.bfloat16 == DTYPE:  # cut off, not rounded: one instruction
        hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        hi = x.to(DTYPE).to(tl.float32)
    return hi.to(DTYPE), (x - hi).to(DTYPE)


@triton.jit
def masked_sum(mask, x):
    """`mask @ x`: sums of float32 values over selected tokens on the matrix unit; the mask has the inputs' dtype.

    With a mask of 16 bits it takes two terms of x, so a sum errs by up to 2^-17 of the sum of absolute values.
    """
    if tl.float32 == mask.dtype:
        return tl.dot(mask, x, input_precision="tf32x3")
    hi, lo = two_terms(x, mask.dtype)
    return tl.dot(mask, hi, tl.dot(mask, lo))


@triton.jit
def level_factor(g, o_c, level, DTYPE: tl.constexpr):
    """Decay between each row and the middle of its block of `2 << level` rows, as a factor <= 1 (g: log2-decays).

    A pair of tokens i >= j with i in the right and j in the left half meets at that middle, so the product of the two
    factors is the decay between them: no exponent is ever positive, whatever the gates are.
    """
    row, other = o_c[:, None], o_c[None, :]
    middle = (row >> (level + 1) << (level + 1)) + (1 << level) - 1
    between = (other <= row) ^ (other <= middle)
    return tl.exp2(masked_sum(between.to(DTYPE), g))


@triton.jit
def level_mask(o_c, level):
    """Pairs with one token in each half of a block of `2 << level` rows.

    This form keeps few registers: a difference of the numbers of halves would be kept until it is shifted.
    """
    return (o_c >> level)[:, None] == ((o_c >> level) ^ 1)[None, :]
