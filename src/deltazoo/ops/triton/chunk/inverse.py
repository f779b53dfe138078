"""The inverse `A = (I + L)^-1` of every chunk, `L = strict_lower(diag(beta) gram(k, k))`.

Forward substitution in float32 inside diagonal blocks of 16 tokens, then block substitution with small tf32 products,
of three terms in strict mode: so the inverse is right for repeated keys with any step size in [0, 2]. It is stored as
one 16-bit term in fast mode and as two that sum to it in strict mode, since its rounding to one term is what breaks
chunk kernels on repeated keys with step sizes above 1 (docs/precision.md). The second term takes no memory of its own:
A^T is upper triangular, and the entries below its diagonal are free. In fast mode they are zero, so that strict kernels
can read a chunk of either mode.

No matrix passes through memory on the way. A warp owns 16 rows of `L`, so the diagonal block that it inverts is in its
own registers, and rows reach the threads that need them by shuffles.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.tiles import CHUNK

# The largest erase gain `beta |k|^2` of a chunk for which fast precision is right; with an erase key, the largest
# `beta |e . k|` of any two tokens. Step sizes up to 1 on unit keys stay below: rounding to bfloat16 makes |k|^2 at most
# 1.004. docs/precision.md has measurements of larger gains.
MAX_FAST_GAIN = tl.constexpr(1.005)


@triton.jit
def side_by_side(X, Y):
    """`[X, Y]`, two matrices of the same shape."""
    XY = tl.permute(tl.join(X, Y), (0, 2, 1))
    return tl.reshape(XY, [X.shape[0], 2 * X.shape[1]])


@triton.jit
def halves(X):
    """Left and right half of the columns of a matrix."""
    return tl.split(tl.permute(tl.reshape(X, [X.shape[0], 2, X.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def quarters(X):
    """The four quarters of the columns of a matrix."""
    left, right = halves(X)
    X0, X1 = halves(left)
    X2, X3 = halves(right)
    return X0, X1, X2, X3


@triton.jit
def round_evenly(x, DTYPE: tl.constexpr):
    """Round a float32 matrix up or down to 16 bits, by a fixed pattern, so that errors of equal entries cancel in sums.

    For one key with one step size A has equal entries along its diagonals. Rounded to the nearest, they all have the
    same error, and the rest of the state after a chunk has 64 times that error. The pattern is an additive sequence
    modulo 1 over rows and columns; its sums along rows, columns and diagonals stay close to their means.
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
    """x as a factor of a tf32 product, rounded to the nearest with ROUND; otherwise the matrix unit truncates it.

    The errors of truncation add up over equal entries, to more than the rounding of A to float16 (bfloat16 has three
    bits fewer).
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
    L, gain, AP, large_gain, strict_L, slot, C: tl.constexpr, STRICT: tl.constexpr, BY_GAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the transposed inverse of a fast chunk; of a strict one L, or the inverse if `strict_L` is None.

    `invert_kernel` inverts L. With BY_GAIN the erase gain decides, and the decision is stored in `large_gain` for later
    kernels.
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
    elif STRICT and strict_L is None:
        store_strict(L, AP, C)
    elif STRICT:
        tl.store(strict_L + o_cc, L)
    else:
        store_fast(L, AP, C, PRECISION)


@triton.jit(do_not_specialize=["chunks", "slots"])
def invert_kernel(large_gain, strict_L, AP, chunks, slots, C: tl.constexpr):
    """The strict inverse of all chunks whose `large_gain` is set, or of all chunks if `large_gain` is None.

    One program handles up to 16 neighbouring `chunks`, of `slots` in all. It is a separate kernel because it takes more
    registers than the rest of the preparation has (docs/log.md). Grid (programs,).
    """
    start, o = tl.program_id(0).to(tl.int64) * chunks, tl.arange(0, 16)
    count = tl.minimum(slots - start, chunks).to(tl.int32)
    if large_gain is not None:
        large = tl.load(large_gain + start + o, mask=o < count, other=0)
        if tl.max(large, 0) == 0:
            return
    for i in tl.range(0, count, num_stages=1, disable_licm=True):
        slot = start + i
        if large_gain is None or tl.load(large_gain + slot) != 0:
            o_c = tl.arange(0, C)
            L = tl.load(strict_L + slot * (C * C) + o_c[:, None] * C + o_c[None, :])
            # Adding L to a product of zeros gives it the layout over threads that `inverse` needs.
            none = tl.zeros([C, 16], dtype=AP.dtype.element_ty)
            L = tl.dot(none, tl.trans(none), L)
            store_strict(L, AP + slot * (2 * C * C), C)


@per_plan
def _constants(plan: Plan) -> Constants:
    grid, neighbours = plan.neighbour_grid()
    return Constants(*grid, C=CHUNK, **neighbours, **plan.tiles.invert)


def launch_invert(plan: Plan, large_gain: Tensor | None, strict_L: Tensor, AP: Tensor | None) -> None:
    """Fill A of strict chunks: all chunks or, by the gain, those with a large one."""
    launch(invert_kernel, _constants(plan), large_gain, strict_L, AP)
