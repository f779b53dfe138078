"""The gradients of a chunk's inputs on Hopper, for one decay per key channel: `chunk.gradients_channel` with layouts,
copies and waits of its own.

Tiles of key channels pass through a single buffer: it is free for the next tile as soon as the products with S and dS
have read it, halfway through a tile. Plain Triton waits for every matrix product where it is
issued, and moves tiles through shared memory from layout to layout; two thirds of its barriers are gone here
(docs/kernels.md).
"""

from typing import Any

from torch import Tensor

from deltazoo.ops.triton.chunk.decay_factors import LOG2_FLOOR, LOG2E
from deltazoo.ops.triton.chunk.score_gradients import NEAR_ZERO
from deltazoo.ops.triton.gluon import (
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    jit,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.channel_tiles import (
    ALL_TILES,
    BK,
    CHANNELS,
    LEFT,
    RIGHT,
    ROWS,
    ROWS_32,
    SUMS,
    SWIZZLED,
    SWIZZLED_TILE,
    TILE,
    TOKENS,
    WIDE_ROWS,
    copy_tile,
    copy_values,
    far_tiles,
    next_tile,
    overlap_of,
    reciprocal,
    row_pairs,
    score_gradients,
    store_two_terms,
)
from deltazoo.ops.triton.hopper.scan import C, D
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Problem


@jit
def tile_offsets(n, key_stride, stride):
    """Offsets into a tile of S and dS, of keys, of gradients, and of log-decays, from row n on."""
    row, column = n + gl.arange(0, C, gl.SliceLayout(1, ROWS)), gl.arange(0, BK, gl.SliceLayout(0, ROWS))[None, :]
    state_row, gate_row = n + gl.arange(0, D, gl.SliceLayout(1, ROWS)), n + gl.arange(0, C, gl.SliceLayout(1, ROWS_32))
    return (
        state_row[:, None] * D + column,
        row[:, None] * key_stride + column,
        row[:, None] * stride + column,
        gate_row[:, None] * stride + gl.arange(0, BK, gl.SliceLayout(0, ROWS_32))[None, :],
    )


@jit(do_not_specialize=["nothing", "T", "NT", "H", "HV"])
def hopper_chunk_gradients_channel_kernel(
    q, k, erase_key, v, beta, log_decay, G, strong_decay, U, Z, d_output, states, d_states, d_states_high, dq, dk,
    d_erase_key, dv, d_beta, d_log_decay, scale, nothing, T, NT, H, HV, GROUPED: gl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one value head, except tiles with too strong a decay; grid (HV, NT, B).

    Z has dv already in tokens whose step size is not near zero. If there are such tiles, dv of the others is left to
    their kernel, which reads Z there.

    dv lies in the memory of Z, and dq and dk in that of `d_states` and `d_states_high`, if there is the latter. Only
    this program reads what it overwrites. All of Z is in shared memory before it stores dv, and a tile of dS before it
    stores that tile of dq and dk; later copies are of other tiles.

    `nothing` is zero, unknown to the compiler: otherwise it would keep the address of every operand of its products and
    every offset in a register.
    """
    i_h, i_t, i_b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first = i_b.to(gl.int64) * T + i_t * C
    rows = gl.minimum(T - i_t * C, C)
    slot = (i_b.to(gl.int64) * NT + i_t) * HV + i_h
    far = far_tiles(strong_decay + slot, G + slot * D)
    if far == ALL_TILES:
        return
    tiles_left = ALL_TILES ^ far
    o, count = next_tile(tiles_left)
    base = (first * HV + i_h) * D
    keys = (first * H + i_h // (HV // H)) * D if GROUPED else base
    key_stride = H * D if GROUPED else HV * D
    q, k, log_decay, G = q + keys, k + keys, log_decay + base, G + slot * D
    dq, dk, d_log_decay, d_beta = dq + base, dk + base, d_log_decay + base, d_beta + first * HV + i_h
    states, d_states = states + slot * (D * D), d_states + (slot * (D * D) if d_states_high is None else base)
    if d_states_high is not None:
        d_states_high += base
    if erase_key is not None:
        erase_key, d_erase_key = erase_key + keys, d_erase_key + base

    # Copies of dO, U and Z, then of the first tile.
    dO_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    U_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    Z_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    wide_row = gl.arange(0, C, gl.SliceLayout(1, WIDE_ROWS))
    o_values = wide_row[:, None] * (HV * D) + gl.arange(0, D, gl.SliceLayout(0, WIDE_ROWS))[None, :]
    m_values = (wide_row < rows)[:, None]
    dO, b_U, b_Z = dO_buffer.index(0), U_buffer.index(0), Z_buffer.index(0)
    copy_values(d_output + base, U + base, Z + base, o_values, m_values, dO, b_U, b_Z)
    S_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, D, BK], SWIZZLED_TILE)
    dS_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, D, BK], SWIZZLED_TILE)
    key_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], SWIZZLED_TILE)
    query_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], SWIZZLED_TILE)
    erase_tile = key_tile
    if erase_key is not None:
        erase_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], SWIZZLED_TILE)
    o_states, o_keys, o_gradients, o_gates = tile_offsets(0, key_stride, HV * D)
    m_rows = (gl.arange(0, C, gl.SliceLayout(1, ROWS)) < rows)[:, None]
    tiles = (S_buffer.index(0), dS_buffer.index(0), key_tile, query_tile, erase_tile)
    copy_tile(states, d_states, d_states_high, k, q, erase_key, o_states + o, o_gradients, o, o_keys + o, m_rows, tiles)
    m_gates = (gl.arange(0, C, gl.SliceLayout(1, ROWS_32)) < rows)[:, None]
    next_g = gl.load(log_decay + (o_gates + o), mask=m_gates, other=0.0)

    dP_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SWIZZLED)
    ZU_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SWIZZLED)
    token = gl.arange(0, C, TOKENS)
    m_tokens = token < rows
    diagonal, rest, b_dbeta = score_gradients(
        v + base, dv + base, beta + slot * C, d_beta, wide_row, o_values, m_values, m_values & (far == 0), token,
        HV, rows, scale, dO, b_U, b_Z, dP_buffer.index(0), ZU_buffer.index(0),
    )  # fmt: skip

    hi_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    lo_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    written_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    query_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    erase_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    i, j = gl.arange(0, C, gl.SliceLayout(1, LEFT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LEFT))[None, :]
    earlier = gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16)  # a product with it is a running sum over tokens
    everything = gl.full([C, C], 1.0, gl.bfloat16, LEFT)
    no_sums = gl.full([C, BK], 0.0, gl.float32, SUMS)
    none = gl.full([C, BK], 0.0, gl.float32, TILE)
    for _ in range(0, count):
        n = o * nothing
        o_states, o_keys, o_gradients, o_gates = tile_offsets(n, key_stride, HV * D)
        dO, b_U, b_Z, S, dS = (
            dO_buffer.index(n), U_buffer.index(n), Z_buffer.index(n), S_buffer.index(n), dS_buffer.index(n),
        )  # fmt: skip
        dP, ZU, hi, lo = dP_buffer.index(n), ZU_buffer.index(n), hi_buffer.index(n), lo_buffer.index(n)
        written, query, erase = written_buffer.index(n), query_buffer.index(n), erase_buffer.index(n)

        # G, and after it the products with the states.
        store_two_terms(gl.maximum(next_g.to(gl.float32) * LOG2E, LOG2_FLOOR), hi, lo)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        b_dq = warpgroup_mma(dO, S, none, use_acc=False, is_async=True)
        b_row = warpgroup_mma(b_Z, S, none, use_acc=False, is_async=True)
        b_col = warpgroup_mma(b_U, dS, none, use_acc=False, is_async=True)
        b_G = mma_v2(earlier, hi.load(RIGHT), mma_v2(earlier, lo.load(RIGHT), no_sums))
        g_last = gl.load(G + o + gl.arange(0, BK, CHANNELS))[None, :]
        middle = gl.floor(0.5 * g_last)  # `chunk.decay_factors.middle_of`
        k_16, q_16 = key_tile.load(TILE), query_tile.load(TILE)
        e_16 = k_16 if erase_key is None else erase_tile.load(TILE)
        overlap = overlap_of(S, dS)
        b_G = gl.convert_layout(b_G, TILE) - middle
        entry, b_k = gl.exp2(b_G), k_16.to(gl.float32)
        k_written = b_k * gl.exp2(-b_G)
        written.store(k_written.to(gl.bfloat16))
        query.store((q_16.to(gl.float32) * (entry * scale)).to(gl.bfloat16))
        erase.store((-rest[:, None] * e_16.to(gl.float32) * entry).to(gl.bfloat16))
        b_dq, b_row, b_col = warpgroup_mma_wait(0, deps=[b_dq, b_row, b_col])
        to_middle = gl.exp2(middle)
        b_dq, b_row = b_dq * to_middle, b_row * to_middle
        b_col = b_col * gl.exp2(g_last - middle)  # the decay to the chunk's end is that times `1 / entry`
        last = row_pairs(k_written * b_col)
        last += overlap * gl.convert_layout(gl.exp2(g_last), gl.SliceLayout(0, last.type.layout))[None, :, :]
        fence_async_shared()
        barrier()

        # The products over tokens, while the next tile is copied.
        b_dq = warpgroup_mma(dP, written, b_dq, is_async=True)
        b_row = warpgroup_mma(ZU, written, b_row, is_async=True)
        b_col = warpgroup_mma(dP.permute((1, 0)), query, b_col, is_async=True)
        b_col = warpgroup_mma(ZU.permute((1, 0)), erase, b_col, is_async=True)
        tiles_left = tiles_left & (tiles_left - 1)
        more, next_o = tiles_left != 0, next_tile(tiles_left)[0]
        if more:
            tiles = (S, dS, key_tile, query_tile, erase_tile)
            copy_tile(
                states, d_states, d_states_high, k, q, erase_key, o_states + next_o, o_gradients, next_o,
                o_keys + next_o, m_rows, tiles,
            )  # fmt: skip
        b_dq, b_row = warpgroup_mma_wait(2, deps=[b_dq, b_row])
        b_k, b_q, b_e = k_16.to(gl.float32), q_16.to(gl.float32), e_16.to(gl.float32)
        b_dq = (entry * scale) * b_dq
        b_dG = b_q * b_dq
        b_dq += diagonal[:, None] * b_k
        b_row = -entry * b_row
        b_dbeta += gl.sum(b_e * b_row, 1)
        b_row *= rest[:, None]
        b_dG += b_e * b_row
        b_dk = diagonal[:, None] * b_q
        if erase_key is None:
            b_dk += b_row
        if more:
            next_g = gl.load(log_decay + (o_gates + next_o), mask=m_gates, other=0.0)
        b_col = warpgroup_mma_wait(0, deps=[b_col])
        b_col = b_col * reciprocal(entry)
        b_dG -= b_k * b_col
        b_dk += b_col

        # d_log_decay is the sum over this token and all later ones: the sum over all tokens less that over earlier
        # ones.
        barrier()  # the products of all warps have read their operands
        store_two_terms(-b_dG, hi, lo)
        last = gl.reshape(last + row_pairs(b_dG), [BK, BK])
        store_two_terms(last, query.slice(0, BK), query.slice(BK, BK))
        if not GROUPED:
            written.store(b_dq.to(gl.bfloat16))
            erase.store(b_dk.to(gl.bfloat16))
        barrier()
        b_dg = mma_v2(everything, query.load(RIGHT), no_sums)
        b_dg = mma_v2(earlier, hi.load(RIGHT), mma_v2(earlier, lo.load(RIGHT), b_dg))
        o_tile = (token + n)[:, None] * (HV * D) + gl.arange(0, BK, CHANNELS)[None, :]
        if GROUPED:  # in float32, for the sum over the heads of a group
            gl.store(dq + (o_tile + o), b_dq, mask=m_tokens[:, None])
            gl.store(dk + (o_tile + o), b_dk, mask=m_tokens[:, None])
            if erase_key is not None:
                gl.store(d_erase_key + (o_tile + o), b_row, mask=m_tokens[:, None])
        else:
            gl.store(dq + (o_gradients + o), written.load(ROWS), mask=m_rows)
            gl.store(dk + (o_gradients + o), erase.load(ROWS), mask=m_rows)
            if erase_key is not None:
                barrier()
                written.store(b_row.to(gl.bfloat16))
                barrier()
                gl.store(d_erase_key + (o_gradients + o), written.load(ROWS), mask=m_rows)
        gl.store(d_log_decay + (o_tile + o), gl.convert_layout(b_dg, TILE) + b_dG, mask=m_tokens[:, None])
        o = next_o
    gl.store(d_beta + token * HV, b_dbeta, mask=m_tokens & (rest <= NEAR_ZERO))


def channel_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of both Gluon kernels for gradients with decay per channel."""
    return dict(
        scale=plan.scale, nothing=0, T=plan.T, NT=plan.NT, H=plan.H, HV=plan.HV,
        GROUPED=plan.grouped, num_warps=4,
    )  # fmt: skip


@per_plan
def _constants(plan: Plan) -> Constants:
    return Constants(*plan.chunk_grid(), **channel_arguments(plan))


def launch_gradients_channel(p: Problem, tensors: tuple[Tensor | None, ...]) -> None:
    """Fill the gradients of chunks without strong decay, from the tensors of `backward.of_chunks`."""
    launch(hopper_chunk_gradients_channel_kernel, _constants(p.plan), *tensors)
