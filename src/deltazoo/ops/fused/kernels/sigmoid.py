"""The logistic function, for kernels where arithmetic and not memory would set the pace."""

import triton
import triton.language as tl

__all__ = ["sigmoid"]


@triton.jit
def sigmoid(x, HALF: tl.constexpr):
    """`1 / (1 + exp(-x))` of float32 values; where HALF, good to a few roundings of float32, for results in half.

    That takes five instructions, where the guards of `exp` and the division against subnormal numbers make it twelve.
    """
    if HALF:
        root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))  # log2(e)
        return root * root
    return tl.sigmoid(x)
