"""The gradients of the chunks that `gradients_channel` leaves out, since no single product spans a channel's decay.

As in `chunk.gradients_levels`, distant pairs of tokens take products of their own. The kernel starts with the largest
blocks: if no channel decays too far from the middle of a block to its ends, one product computes all pairs within such
blocks. Otherwise it computes those with a token in each half, and blocks half as long come next.

Products over tokens are synchronous (mma.sync): their left operands are masked in registers, from which asynchronous
ones are assembled wrongly (docs/kernels.md).
"""

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
    HALF_RANGE,
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
    row_pairs,
    score_gradients,
    store_two_terms,
)
from deltazoo.ops.triton.hopper.gradients_channel import channel_arguments
from deltazoo.ops.triton.hopper.scan import C, D
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Problem


@jit
def sums_over_tokens(mask, hi, lo):
    """Sums, for each token of a chunk, over the tokens in `mask [C, C]`, of two terms in shared memory."""
    no_sums = gl.full([C, BK], 0.0, gl.float32, SUMS)
    mask = gl.where(mask, 1.0, 0.0).to(gl.bfloat16)
    return gl.convert_layout(mma_v2(mask, hi.load(RIGHT), mma_v2(mask, lo.load(RIGHT), no_sums)), TILE)


@jit
def product_of_pairs(W, pairs, tile, accumulator, ALL: gl.constexpr):
    """The accumulator plus the product of W, for these pairs of tokens or ALL, and a tile, both in shared memory."""
    weights = W.load(LEFT)
    if not ALL:
        weights = gl.where(pairs, weights, 0.0)
    return mma_v2(weights, tile.load(RIGHT), accumulator)


@jit
def add_pairs(b_dq, b_row, b_col, level, operands, buffers, WHOLE: gl.constexpr):
    """Add the pairs of tokens within blocks of `2 << level`, or, if these are too long, those between their halves.

    WHOLE: one block is the chunk, so that no pairs are masked. It also returns whether the blocks were in range.
    """
    k_16, q_16, e_16, rest, token, reader, scale = operands
    dP, ZU, hi, lo, written, query, erase = buffers
    i, j = reader[:, None], gl.arange(0, C, gl.SliceLayout(0, LEFT))[None, :]
    middle = (reader >> (level + 1) << (level + 1)) + (1 << level) - 1
    decay = sums_over_tokens((j <= i) ^ (j <= middle[:, None]), hi, lo)  # from it to the last token of the left half
    within = gl.min(gl.min(decay, 1), 0) >= -HALF_RANGE
    right = (token >> level & 1)[:, None] == 1
    entry = gl.exp2(gl.where(right | (not within), decay, -decay))
    undone = gl.exp2(gl.where(right & within, -decay, decay))
    if WHOLE:
        entry, undone = gl.where(right | within, entry, 0.0), gl.where(right & (not within), 0.0, undone)
    written.store((k_16.to(gl.float32) * undone).to(gl.bfloat16))
    query.store((q_16.to(gl.float32) * (entry * scale)).to(gl.bfloat16))
    erase.store((-rest[:, None] * e_16.to(gl.float32) * entry).to(gl.bfloat16))
    shift = level + within.to(gl.int32)
    pairs = i >> shift == (j >> shift) ^ (1 - within.to(gl.int32))
    barrier()
    no_sums = gl.full([C, BK], 0.0, gl.float32, SUMS)
    b_dq += entry * gl.convert_layout(product_of_pairs(dP, pairs, written, no_sums, WHOLE), TILE)
    b_row += entry * gl.convert_layout(product_of_pairs(ZU, pairs, written, no_sums, WHOLE), TILE)
    b_pairs = product_of_pairs(dP.permute((1, 0)), pairs, query, no_sums, WHOLE)
    b_pairs = product_of_pairs(ZU.permute((1, 0)), pairs, erase, b_pairs, WHOLE)
    b_col += undone * gl.convert_layout(b_pairs, TILE)
    return b_dq, b_row, b_col, within


@jit(do_not_specialize=["nothing", "chunks", "slots", "T", "NT", "H", "HV"])
def hopper_chunk_gradients_strong_kernel(
    q, k, erase_key, v, beta, log_decay, G, strong_decay, U, Z, d_output, states, d_states, d_states_high, dq, dk,
    d_erase_key, dv, d_beta, d_log_decay, scale, nothing, chunks, slots, T, NT, H, HV, GROUPED: gl.constexpr,
):  # fmt: skip
    """Gradients of the tiles that `hopper_chunk_gradients_channel_kernel` leaves out; grid (programs,).

    A program looks at `chunks` neighbouring ones, of `slots` in all. `nothing` is that of the other kernel; values that
    do not change from chunk to chunk also depend on it.
    """
    dO_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    U_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    Z_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SWIZZLED)
    dP_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SWIZZLED)
    ZU_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SWIZZLED)
    S_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, D, BK], SWIZZLED_TILE)
    dS_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, D, BK], SWIZZLED_TILE)
    key_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    query_tile_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    erase_tile_buffer = key_buffer
    if erase_key is not None:
        erase_tile_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    hi_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    lo_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    written_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    query_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    erase_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, C, BK], SWIZZLED_TILE)
    no_sums = gl.full([C, BK], 0.0, gl.float32, SUMS)
    none = gl.full([C, BK], 0.0, gl.float32, TILE)
    start = gl.program_id(0).to(gl.int64) * chunks
    count = gl.minimum(slots - start, chunks).to(gl.int32)
    for chunk in range(0, count):
        slot, n = start + chunk, chunk * nothing
        tiles_left = far_tiles(strong_decay + slot, G + slot * D)
        if tiles_left != 0:
            o, tile_count = next_tile(tiles_left)
            i_h, i_t, i_b = (slot % HV).to(gl.int32), (slot // HV % NT).to(gl.int32), slot // HV // NT
            first = i_b * T + i_t * C
            rows = gl.minimum(T - i_t * C, C)
            base = (first * HV + i_h) * D
            keys = (first * H + i_h // (HV // H)) * D if GROUPED else base
            key_stride = H * D if GROUPED else HV * D
            erase_keys = erase_key if erase_key is None else erase_key + keys

            wide_row = gl.arange(0, C, gl.SliceLayout(1, WIDE_ROWS)) + n
            o_values = wide_row[:, None] * (HV * D) + gl.arange(0, D, gl.SliceLayout(0, WIDE_ROWS))[None, :]
            m_values = (wide_row < rows)[:, None]
            dO, b_U, b_Z = dO_buffer.index(n), U_buffer.index(n), Z_buffer.index(n)
            copy_values(d_output + base, U + base, Z + base, o_values, m_values, dO, b_U, b_Z)
            row = gl.arange(0, C, gl.SliceLayout(1, ROWS)) + n
            column = gl.arange(0, BK, gl.SliceLayout(0, ROWS))
            o_states = (gl.arange(0, D, gl.SliceLayout(1, ROWS)) + n)[:, None] * D + column[None, :]
            o_keys = row[:, None] * key_stride + column[None, :]
            m_rows = (row < rows)[:, None]
            tiles = (
                S_buffer.index(n), dS_buffer.index(n), key_buffer.index(n), query_tile_buffer.index(n),
                erase_tile_buffer.index(n),
            )  # fmt: skip
            o_rows = row[:, None] * (HV * D) + column[None, :]
            gradients = d_states + (slot * (D * D) if d_states_high is None else base)
            gradients_high = d_states_high if d_states_high is None else d_states_high + base
            copy_tile(
                states + slot * (D * D), gradients, gradients_high, k + keys, q + keys, erase_keys, o_states + o,
                o_rows, o, o_keys + o, m_rows, tiles,
            )  # fmt: skip
            gate_row = gl.arange(0, C, gl.SliceLayout(1, ROWS_32)) + n
            o_gates = gate_row[:, None] * (HV * D) + gl.arange(0, BK, gl.SliceLayout(0, ROWS_32))[None, :]
            m_gates = (gate_row < rows)[:, None]
            next_g = gl.load(log_decay + base + (o_gates + o), mask=m_gates, other=0.0)
            token = gl.arange(0, C, TOKENS) + n
            m_tokens = token < rows
            step_gradients = d_beta + first * HV + i_h
            diagonal, rest, b_dbeta = score_gradients(
                v + base, dv + base, beta + slot * C, step_gradients, wide_row, o_values, m_values, m_values, token, HV,
                rows, scale, dO, b_U, b_Z, dP_buffer.index(n), ZU_buffer.index(n),
            )  # fmt: skip

            m_sums = m_tokens & (rest <= NEAR_ZERO)
            if tiles_left != ALL_TILES:  # with the sums over the others
                b_dbeta = gl.load(step_gradients + token * HV, mask=m_sums, other=0.0)
            for _ in range(0, tile_count):
                n = o * nothing
                dO, b_U, b_Z, S, dS = (
                    dO_buffer.index(n), U_buffer.index(n), Z_buffer.index(n), S_buffer.index(n), dS_buffer.index(n),
                )  # fmt: skip
                dP, ZU, hi, lo = dP_buffer.index(n), ZU_buffer.index(n), hi_buffer.index(n), lo_buffer.index(n)
                written, query, erase = written_buffer.index(n), query_buffer.index(n), erase_buffer.index(n)
                key_tile, query_tile, erase_tile = (
                    key_buffer.index(n), query_tile_buffer.index(n), erase_tile_buffer.index(n),
                )  # fmt: skip
                reader = gl.arange(0, C, gl.SliceLayout(1, LEFT)) + n
                i, j = reader[:, None], gl.arange(0, C, gl.SliceLayout(0, LEFT))[None, :]

                # Reads of the state decay from the chunk's start, additions to its gradient to the end.
                store_two_terms(gl.maximum(next_g.to(gl.float32) * LOG2E, LOG2_FLOOR), hi, lo)
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()
                b_dq = warpgroup_mma(dO, S, none, use_acc=False, is_async=True)
                b_row = warpgroup_mma(b_Z, S, none, use_acc=False, is_async=True)
                b_col = warpgroup_mma(b_U, dS, none, use_acc=False, is_async=True)
                k_16, q_16 = key_tile.load(TILE), query_tile.load(TILE)
                e_16 = k_16 if erase_key is None else erase_tile.load(TILE)
                last = overlap_of(S, dS)
                g_last = gl.load(G + slot * D + o + gl.arange(0, BK, CHANNELS))[None, :]
                last *= gl.convert_layout(gl.exp2(g_last), gl.SliceLayout(0, last.type.layout))[None, :, :]
                entry = gl.exp2(sums_over_tokens(j <= i, hi, lo))
                to_end = gl.exp2(sums_over_tokens(j > i, hi, lo))
                b_dq, b_row, b_col = warpgroup_mma_wait(0, deps=[b_dq, b_row, b_col])
                b_dq, b_row, b_col = entry * b_dq, entry * b_row, to_end * b_col
                last += row_pairs(k_16.to(gl.float32) * b_col)
                barrier()  # all warps have read the tile
                tiles_left = tiles_left & (tiles_left - 1)
                more, next_o = tiles_left != 0, next_tile(tiles_left)[0]
                if more:
                    copy_tile(
                        states + slot * (D * D), gradients, gradients_high, k + keys, q + keys, erase_keys,
                        o_states + next_o, o_rows, next_o, o_keys + next_o, m_rows,
                        (S, dS, key_tile, query_tile, erase_tile),
                    )  # fmt: skip

                operands = (k_16, q_16, e_16, rest, token, reader, scale)
                buffers = (dP, ZU, hi, lo, written, query, erase)
                b_dq, b_row, b_col, within = add_pairs(b_dq, b_row, b_col, 5, operands, buffers, WHOLE=True)
                level = gl.where(within, -1, 4)
                while level >= 0:
                    b_dq, b_row, b_col, within = add_pairs(b_dq, b_row, b_col, level, operands, buffers, WHOLE=False)
                    level = gl.where(within, -1, level - 1)

                b_k, b_q, b_e = k_16.to(gl.float32), q_16.to(gl.float32), e_16.to(gl.float32)
                b_dq, b_row = scale * b_dq, -b_row
                b_dG = b_q * b_dq - b_k * b_col
                b_dq += diagonal[:, None] * b_k
                b_dbeta += gl.sum(b_e * b_row, 1)
                b_row *= rest[:, None]
                b_dG += b_e * b_row
                b_dk = diagonal[:, None] * b_q + b_col
                if erase_key is None:
                    b_dk += b_row
                if more:
                    next_g = gl.load(log_decay + base + (o_gates + next_o), mask=m_gates, other=0.0)

                # d_log_decay is the sum over this token and all later ones, and that of the state.
                barrier()
                store_two_terms(b_dG, hi, lo)
                store_two_terms(gl.reshape(last, [BK, BK]), query.slice(0, BK), query.slice(BK, BK))
                if not GROUPED:
                    written.store(b_dq.to(gl.bfloat16))
                    erase.store(b_dk.to(gl.bfloat16))
                barrier()
                everything = gl.full([C, C], 1.0, gl.bfloat16, LEFT)
                b_dg = gl.convert_layout(mma_v2(everything, query.load(RIGHT), no_sums), TILE)
                b_dg += sums_over_tokens(j >= i, hi, lo)
                o_tile = base + (token[:, None] * (HV * D) + gl.arange(0, BK, CHANNELS)[None, :] + o)
                m_tile = m_tokens[:, None]
                if GROUPED:  # in float32, for the sum over the heads of a group
                    gl.store(dq + o_tile, b_dq, mask=m_tile)
                    gl.store(dk + o_tile, b_dk, mask=m_tile)
                    if erase_key is not None:
                        gl.store(d_erase_key + o_tile, b_row, mask=m_tile)
                else:
                    o_gradients = base + (row[:, None] * (HV * D) + column[None, :] + o)
                    gl.store(dq + o_gradients, written.load(ROWS), mask=m_rows)
                    gl.store(dk + o_gradients, erase.load(ROWS), mask=m_rows)
                    if erase_key is not None:
                        barrier()
                        written.store(b_row.to(gl.bfloat16))
                        barrier()
                        gl.store(d_erase_key + o_gradients, written.load(ROWS), mask=m_rows)
                raw_g = gl.load(log_decay + o_tile, mask=m_tile, other=0.0).to(gl.float32)
                gl.store(d_log_decay + o_tile, gl.where(raw_g > float("-inf"), b_dg, 0.0), mask=m_tile)
                o = next_o
            gl.store(step_gradients + token * HV, b_dbeta, mask=m_sums)


@per_plan
def _constants(plan: Plan) -> Constants:
    grid, neighbours = plan.neighbour_grid()
    return Constants(*grid, **neighbours, **channel_arguments(plan))


def launch_gradients_levels(p: Problem, tensors: tuple[Tensor | None, ...]) -> None:
    """Fill the gradients of chunks with strong decay, from the tensors of `backward.of_chunks`."""
    launch(hopper_chunk_gradients_strong_kernel, _constants(p.plan), *tensors)
