"""Float32 values as several 16-bit terms, and sums of them over tokens on the matrix unit."""

import triton
import triton.language as tl


@triton.jit
def two_terms(x, DTYPE: tl.constexpr):
    """Float32 x as two terms of 16 bits that sum to it but for 2^-17 of it."""
    if tl.bfloat16 == DTYPE:  # cut off, not rounded: one instruction
        hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        hi = x.to(DTYPE).to(tl.float32)
    return hi.to(DTYPE), (x - hi).to(DTYPE)


@triton.jit
def masked_sum(mask, x):
    """`mask @ x`: sums of float32 values over selected tokens on the matrix unit; the mask has the inputs' dtype.

    Of 16 bits it takes two terms of x, so a sum is off by up to 2^-17 of the sum of absolute values.
    """
    if tl.float32 == mask.dtype:
        return tl.dot(mask, x, input_precision="tf32x3")
    hi, lo = two_terms(x, mask.dtype)
    return tl.dot(mask, hi, tl.dot(mask, lo))
