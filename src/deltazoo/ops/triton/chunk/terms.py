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
def three_terms(x, DTYPE: tl.constexpr):
    """Float32 x as three terms of DTYPE that sum to it; float32 stays one term and two that nothing reads."""
    a = x.to(DTYPE)
    b = (x - a.to(tl.float32)).to(DTYPE)
    c = (x - a.to(tl.float32) - b.to(tl.float32)).to(DTYPE)
    return a, b, c


@triton.jit
def masked_sum(mask, x, y, z):
    """`mask @ (x + y + z)`: sums over selected tokens on the matrix unit. Float32 is all in x."""
    M = mask.to(x.dtype)
    if x.dtype == tl.float32:
        out = tl.dot(M, x, input_precision="tf32x3")
    else:
        out = tl.dot(M, z)
        out = tl.dot(M, y, out)
        out = tl.dot(M, x, out)
    return out


@triton.jit
def masked_sum_of_two(mask, x, PRECISION: tl.constexpr):
    """`mask @ x` with x in two terms."""
    hi, lo = two_terms(x, mask.dtype)
    return tl.dot(mask, hi, tl.dot(mask, lo, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def masked_sum_transposed(x, y, z, mask):
    """`(x + y + z) @ mask`: the same with tokens along the rows."""
    M = mask.to(x.dtype)
    if x.dtype == tl.float32:
        out = tl.dot(x, M, input_precision="tf32x3")
    else:
        out = tl.dot(z, M)
        out = tl.dot(y, M, out)
        out = tl.dot(x, M, out)
    return out
