"""The parts of both Gluon kernels for gradients with one decay per key channel: layouts, copies, gradients of scores.

Four warps own one chunk of one value head. dO, U and Z stay in shared memory, and tiles of key channels pass through a
single buffer.
"""

from deltazoo.ops.triton.chunk.score_gradients import NEAR_ZERO
from deltazoo.ops.triton.gluon import (
    async_copy,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.scan import C, D

BK = gl.constexpr(32)  # key channels per tile
ALL_TILES = gl.constexpr(15)  # as bits

HALF_RANGE = gl.constexpr(96.0)
"""Most decay of a channel between the middle of a chunk or block and an end, in log2: half of `centred_range`."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of an accumulator `[C, C]` of a product."""
TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
"""Layout of an accumulator `[C, BK]` of a product."""
TOKENS = gl.constexpr(gl.SliceLayout(1, TILE.value))
CHANNELS = gl.constexpr(gl.SliceLayout(0, TILE.value))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Layout of sums over tokens `[C, BK]`, with the registers of TILE. They are synchronous products (mma.sync): before
13.3 ptxas hands asynchronous products registers with constants before these are set (docs/kernels.md)."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SUMS.value, 2))
# Layouts of loads and stores of 16 bytes at a time: all channels, a tile of 16 bits, and one of float32.
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
ROWS_32 = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@jit
def store_two_terms(x, hi, lo):
    """Store float32 x as two terms of 16 bits whose sum differs from it by 2^-17 of it."""
    cut = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    hi.store(cut.to(gl.bfloat16))
    lo.store((x - cut).to(gl.bfloat16))


@jit
def reciprocal(x):
    """`1 / x` except for its last bit, for normal float32 x. A division, for any x, takes ten instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def row_pairs(x):
    """Sums of rows r and r + 8 of `x [C, BK]`, which one thread holds, as `[4, 8, BK]`."""
    return gl.sum(gl.reshape(x, [4, 2, 8, BK]), 1)


@jit
def overlap_of(S, dS):
    """The products of two buffers `[D, BK]` by element, summed over rows into 32 sums, in the form of `row_pairs`."""
    overlap = S.slice(0, C).load(TILE).to(gl.float32) * dS.slice(0, C).load(TILE).to(gl.float32)
    overlap += S.slice(C, C).load(TILE).to(gl.float32) * dS.slice(C, C).load(TILE).to(gl.float32)
    return row_pairs(overlap)


@jit
def either(a, b):
    """The bits of both."""
    return a | b


@jit
def far_tiles(strong_decay, G):
    """The tiles of a chunk with channels that decay beyond the range of one product, as bits."""
    channel = gl.arange(0, D, gl.BlockedLayout([4], [32], [4], [0]))
    decay = gl.load(G + channel, mask=gl.load(strong_decay) == 2, other=0.0)
    return gl.reduce(gl.where(decay < -2 * HALF_RANGE, 1 << channel // BK, 0), 0, either)


@jit
def next_tile(tiles):
    """The first channel of the first of these tiles, and the number of tiles."""
    first = tiles & -tiles
    number = (first > 1).to(gl.int32) + (first > 2).to(gl.int32) + (first > 4).to(gl.int32)
    return BK * number, (tiles & 1) + (tiles >> 1 & 1) + (tiles >> 2 & 1) + (tiles >> 3)


@jit
def copy_values(d_output, U, Z, o_values, mask, dO_buffer, U_buffer, Z_buffer):
    """Begin to copy dO, U and Z of a chunk."""
    async_load(dO_buffer, d_output + o_values, mask=mask)
    async_load(U_buffer, U + o_values, mask=mask)
    async_load(Z_buffer, Z + o_values, mask=mask)
    async_copy.commit_group()


@jit
def copy_tile(states, d_states, d_states_high, k, q, erase_key, o_states, o_rows, o, o_keys, mask, buffers):
    """Begin to copy a tile of key channels of S, dS, k, q and the erase keys, if there are separate ones.

    With `d_states_high` dS lies in the memory of dq and dk, at `o_rows` after channel o, and that of value channels
    from 64 on in `d_states_high`. The sum with o is part of the address, not of the offsets, which spills fewer
    registers.
    """
    S, dS, key_tile, query_tile, erase_tile = buffers
    async_load(key_tile, k + o_keys, mask=mask)
    async_load(query_tile, q + o_keys, mask=mask)
    if erase_key is not None:
        async_load(erase_tile, erase_key + o_keys, mask=mask)
    async_load(S, states + o_states)
    if d_states_high is None:
        async_load(dS, d_states + o_states)
    else:
        async_load(dS.slice(0, C), d_states + o + o_rows)
        async_load(dS.slice(C, C), d_states_high + o + o_rows)
    async_copy.commit_group()


@jit
def score_gradients(
    v, dv, beta, d_beta, wide_row, o_values, m_values, m_stored, token, HV, rows, scale, dO, b_U, b_Z, dP, ZU
):  # fmt: skip
    """Store d_beta where it is <z, u> / beta, dv elsewhere, and in shared memory dP and Z U^T below their diagonals.

    It waits for all copies except the latest. Step sizes near zero have a sum in place of <z, u> / beta
    (`chunk.score_gradients`); no other tokens' values are read, and all others have dv = beta z in place of z. Returns
    the diagonal of dP, the factor of beta that Z lacks, and the values' part of that sum.
    """
    values_beta = gl.load(beta + wide_row)
    small = (values_beta <= NEAR_ZERO)[:, None]
    b_v = gl.load(v + o_values, mask=m_values & small, other=0.0)
    b_beta, m_tokens = gl.load(beta + token), token < rows
    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    no_scores = gl.full([C, C], 0.0, gl.float32, SCORES)
    b_dP = warpgroup_mma(dO, b_U.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    b_ZU = warpgroup_mma(b_Z, b_U.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    z = b_Z.load(WIDE_ROWS).to(gl.float32)
    b_dbeta = gl.convert_layout(gl.sum(z * b_v.to(gl.float32), 1), TOKENS)
    gl.store(dv + o_values, (values_beta[:, None] * z).to(gl.bfloat16), mask=m_stored & small)
    b_dP, b_ZU = warpgroup_mma_wait(0, deps=[b_dP, b_ZU])
    i, j = gl.arange(0, C, gl.SliceLayout(1, SCORES))[:, None], gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
    diagonal = gl.convert_layout(gl.sum(gl.where(i == j, b_dP, 0.0), 1) * scale, TOKENS)
    zu = gl.convert_layout(gl.sum(gl.where(i == j, b_ZU, 0.0), 1), TOKENS)
    large = b_beta > NEAR_ZERO
    gl.store(d_beta + token * HV, zu / gl.where(large, b_beta * b_beta, 1.0), mask=m_tokens & large)
    dP.store(gl.where(i > j, b_dP, 0.0).to(gl.bfloat16))
    ZU.store(gl.where(i > j, b_ZU, 0.0).to(gl.bfloat16))
    return diagonal, gl.where(large, 1.0, b_beta), b_dbeta
