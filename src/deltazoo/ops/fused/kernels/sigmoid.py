"""The logistic function, for kernels whose speed it would limit rather than memory."""

import triton
import triton.language as tl

__all__ = ["sigmoid"]


@triton.jit
def sigmoid(x, HALF: tl.constexpr):
    """`1 / (1 + exp(-x))` of float32 values; with HALF exact to a few roundings of float32, for results in half.

    HALF takes five instructions instead of twelve: `exp` and the division are not guarded against subnormal numbers.
    """
    if HALF:
        root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))  # log2(e)
        return root * root
    return tl.sigmoid(x)
