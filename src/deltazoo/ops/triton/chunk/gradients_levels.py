"""The gradients of a chunk's inputs for one decay per key channel, if no single product spans the decay.

For 16-bit inputs, pairs of tokens within blocks that are in range take one product, the others the levels of
`decay_factors`. For float32 inputs another kernel computes the gradients of all chunks: rows for which `exp(-G)` is in
range take one product, as in `prepare_channel`, and the rows after them (STRONG) six levels of blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head, tokens_of
from deltazoo.ops.triton.chunk.decay_factors import (
    LOG2_FLOOR,
    LOG2E,
    centred_range,
    exponent_range,
    level_mask,
    masked_sum,
)
from deltazoo.ops.triton.chunk.gradients import gradient_arguments
from deltazoo.ops.triton.chunk.score_gradients import load_values, not_near_zero, pair_gradients
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Problem
from deltazoo.ops.triton.tiles import CHUNK


@triton.jit
def level_in_range(g, DTYPE: tl.constexpr):
    """The level from which on pairs need products of their own: within blocks of `1 << level` tokens one is enough.

    It is the level at which no channel leaves half of `centred_range` within a half of a block (g: log2-decays `[64
    tokens, channels]`); a block of one token has no pairs. 6: the whole chunk is one block.
    """
    LIMIT: tl.constexpr = -0.5 * centred_range(DTYPE)
    sums = tl.sum(tl.reshape(g, [16, 4, g.shape[1]]), 1)
    level = tl.where(tl.min(sums) < LIMIT, 0, 3)
    sums = tl.sum(tl.reshape(sums, [8, 2, g.shape[1]]), 1)
    level = tl.where(tl.min(sums) < LIMIT, level, 4)
    sums = tl.sum(tl.reshape(sums, [4, 2, g.shape[1]]), 1)
    level = tl.where(tl.min(sums) < LIMIT, level, 5)
    sums = tl.sum(tl.reshape(sums, [2, 2, g.shape[1]]), 1)
    return tl.where(tl.min(sums) < LIMIT, level, 6)


@triton.jit
def gradients_of_tile(
    q, k, erase_key, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk, d_erase_key,
    d_log_decay, slot, first, rows, i_h, i_k, nothing, scale, value_tiles, H, HV, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, HAS_BETA: tl.constexpr, GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries, keys and log_decay of one tile of BK key channels of one chunk.

    Returns the tile's part of d_beta. `nothing` is zero, which the compiler does not know: otherwise it would keep
    masks and offsets of all tiles in registers.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_v, o_k = tl.arange(0, C) + nothing, tl.arange(0, BV), i_k * BK + tl.arange(0, BK)
    m_c, m_k = o_c < rows, o_k < K
    token, other = o_c[:, None], o_c[None, :]
    values, gates = (first * HV + i_h) * V, (first * HV + i_h) * K
    keys = (first * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else gates
    o_cv, o_gk = token * (HV * V) + o_v[None, :], token * (HV * K) + o_k[None, :]
    o_qk = token * (H * K) + o_k[None, :] if GROUPED else o_gk
    queries, token_gates, outputs = keys, gates, values
    # Offsets of the queries, decays and outputs of the rows, and masks of the rows that have them.
    o_query, o_gate, o_output, m_query, m_gate = o_qk, o_gk, o_cv, m_c, m_c
    if MICRO_STEPS > 1:
        first_token, o_token, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        token_gates, outputs = (first_token * HV + i_h) * K, (first_token * HV + i_h) * V
        queries = (first_token * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else token_gates
        o_output = o_token[:, None] * (HV * V) + o_v[None, :]
        o_gate = o_token[:, None] * (HV * K) + o_k[None, :]
        o_query = o_token[:, None] * (H * K) + o_k[None, :] if GROUPED else o_gate
        m_query, m_gate = m_c & ends, m_c & begins
    m_ck = m_c[:, None] & m_k[None, :]
    m_query_k, m_gate_k = m_query[:, None] & m_k[None, :], m_gate[:, None] & m_k[None, :]

    b_dq, b_row = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_col = tl.zeros([C, BK], dtype=tl.float32)
    b_overlap = tl.zeros([BV, BK], dtype=tl.float32)  # <S, dS>, per value channel
    o_vk = slot * (K * V) + o_v[:, None] * K + o_k[None, :]
    for i_v in tl.range(0, value_tiles, num_stages=STAGES):
        m_v = i_v * BV + o_v < V
        dO_tile, U_tile, Z_tile = load_values(
            d_output + outputs, U + values, Z + values, i_v * BV + o_output, m_query[:, None] & m_v[None, :],
            i_v * BV + o_cv, m_c[:, None] & m_v[None, :],
        )  # fmt: skip
        b_S = tl.load(states + i_v * BV * K + o_vk, mask=m_v[:, None] & m_k[None, :], other=0.0)
        b_dS = tl.load(d_states + i_v * BV * K + o_vk, mask=m_v[:, None] & m_k[None, :], other=0.0)
        b_overlap += b_S.to(tl.float32) * b_dS.to(tl.float32)
        b_dq = tl.dot(dO_tile, b_S, b_dq, input_precision=PRECISION)
        if HAS_BETA:
            b_row = tl.dot(Z_tile, b_S, b_row, input_precision=PRECISION)
        b_col = tl.dot(U_tile, b_dS, b_col, input_precision=PRECISION) + 0.0  # the sum waits, see `score_gradients`

    b_last = tl.exp2(tl.load(G + slot * K + o_k, mask=m_k, other=0.0)) * tl.sum(b_overlap, 0)
    raw_g = tl.load(log_decay + token_gates + o_gate, mask=m_gate_k, other=0.0).to(tl.float32)
    b_g = tl.maximum(raw_g * LOG2E, LOG2_FLOOR)
    # Reads of the state decay from the chunk's start, additions to its gradient to the chunk's end.
    entry = tl.exp2(masked_sum((other <= token).to(DTYPE), b_g))
    b_dq *= scale * entry
    if HAS_BETA:
        # The rows of W have the factor beta: in the gradient of the decay, pairs without a decay between them cancel if
        # the rows of dL, for de, and its columns, for dk, are rounded alike.
        b_beta = tl.load(beta + slot * C + o_c)
        b_row *= -entry * tl.where(not_near_zero(b_beta), b_beta, 1.0)[:, None]
    b_col *= tl.exp2(masked_sum((other > token).to(DTYPE), b_g))
    b_last += tl.sum(tl.load(k + keys + o_qk, mask=m_ck, other=0.0) * b_col, 0)

    # First the pairs within blocks in range, then those between the halves of larger blocks, of `2 << level` tokens.
    # Queries and keys are read anew each time, which spills fewer registers.
    o_cc = token * C + tl.arange(0, C)[None, :]
    first_level = level_in_range(b_g, DTYPE)
    for level in tl.range(tl.maximum(first_level - 1, 0), 6, num_stages=1):
        tl.debug_barrier()  # the compiler would load queries, keys and W once for all levels, and spill them
        within = level < first_level
        # From and to the last token of a block's left half: plus the tokens after it, or minus those up to it.
        middle = (token >> (level + 1) << (level + 1)) + (1 << level) - 1
        sign = tl.where(token > middle, 1.0, -1.0)
        exponent = masked_sum(tl.where((other <= token) ^ (other <= middle), sign, 0.0).to(DTYPE), b_g)
        entry = tl.exp2(tl.where(within, exponent, -tl.abs(exponent)))
        undone = tl.exp2(tl.where(within, -exponent, -tl.abs(exponent)))
        shift = tl.where(within, level + 1, level)
        pairs = token >> shift == (other >> shift) ^ tl.where(within, 0, 1)
        b_k = tl.load(k + keys + o_qk, mask=m_ck, other=0.0)
        q_read = (tl.load(q + queries + o_query, mask=m_query_k, other=0.0) * entry).to(DTYPE)
        k_written = (b_k * undone).to(DTYPE)
        # W in memory is zero except for j < i.
        W_P = tl.where(pairs, tl.load(W + o_cc), 0.0).to(W.dtype.element_ty)
        b_dq += entry * tl.dot(W_P, k_written, input_precision=PRECISION)
        b_pairs = tl.dot(tl.trans(W_P), q_read, input_precision=PRECISION)
        if HAS_BETA:
            b_e = b_k
            if erase_key is not None:
                b_e = tl.load(erase_key + keys + o_qk, mask=m_ck, other=0.0)
            b_beta = tl.load(beta + slot * C + o_c)
            e_read = (tl.where(not_near_zero(b_beta), 1.0, b_beta)[:, None] * b_e * entry).to(DTYPE)
            W_L = tl.where(pairs, tl.load(W + C * C + o_cc), 0.0).to(W.dtype.element_ty)
            b_row += entry * tl.dot(W_L, k_written, input_precision=PRECISION)
            b_pairs = tl.dot(tl.trans(W_L), e_read, b_pairs, input_precision=PRECISION)
        b_col += undone * b_pairs

    tl.debug_barrier()  # otherwise the compiler would keep earlier loads
    b_k = tl.load(k + keys + o_qk, mask=m_ck, other=0.0)
    b_q = tl.load(q + queries + o_query, mask=m_query_k, other=0.0)
    diagonal = tl.load(P_diagonal + o_c)[:, None]
    tl.store(dq + token_gates + o_gate, (b_dq + diagonal * b_k).to(dq.dtype.element_ty), mask=m_query_k)
    b_dk, b_dG = b_col + diagonal * b_q, b_q * b_dq - b_k * b_col
    part = tl.zeros([C], dtype=tl.float32)
    if HAS_BETA:
        b_e = b_k
        if erase_key is not None:
            b_e = tl.load(erase_key + keys + o_qk, mask=m_ck, other=0.0)
        part += tl.sum(b_e * b_row, 1)
        b_beta = tl.load(beta + slot * C + o_c)
        b_row *= tl.where(not_near_zero(b_beta), 1.0, b_beta)[:, None]
        if erase_key is None:
            b_dk += b_row
        else:
            tl.store(d_erase_key + gates + o_gk, b_row.to(d_erase_key.dtype.element_ty), mask=m_ck)
        b_row *= b_e
        b_dG += b_row
    tl.store(dk + gates + o_gk, b_dk.to(dk.dtype.element_ty), mask=m_ck)
    if tl.float16 == DTYPE:  # gradients may exceed its range
        b_dg = tl.cumsum(b_dG, 0, reverse=True)
    else:
        b_dg = masked_sum((other >= token).to(DTYPE), b_dG)
    b_dg += b_last[None, :]
    raw_g = tl.load(log_decay + token_gates + o_gate, mask=m_gate_k, other=0.0)
    b_dg = tl.where(raw_g > float("-inf"), b_dg, 0.0)
    tl.store(d_log_decay + token_gates + o_gate, b_dg, mask=m_gate_k)
    return part


@triton.jit
def exact_sum(x, mask):
    """`x @ mask`: sums of float32 values over selected tokens, along the rows."""
    return tl.dot(x, mask.to(tl.float32), input_precision="tf32x3")


@triton.jit
def exact_gradients_of_tile(
    q, k, erase_key, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk, d_erase_key,
    d_log_decay, slot, first, rows, i_h, i_k, scale, value_tiles, H, HV, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, HAS_BETA: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries, keys and log_decay of one tile of BK key channels of one chunk.

    Returns the tile's part of d_beta.

    Everything is transposed, `[key channels, tokens]`: on Hopper products of 32 rows are synchronous with any number of
    warps, and those of 64 rows have been miscompiled (docs/kernels.md).
    """
    o_c, o_v, o_k = tl.arange(0, C), tl.arange(0, BV), i_k * BK + tl.arange(0, BK)
    m_c, m_k = o_c < rows, o_k < K
    m_ck = m_c[:, None] & m_k[None, :]
    v_base = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    p_W = W + o_c[:, None] * C + o_c[None, :]
    g_last = tl.load(G + slot * K + o_k, mask=m_k, other=0.0)
    # Global loads are issued long before their use, which waits for them.
    o_qk = (first * H + key_head(i_h, H, HV, GROUPED)) * K + o_c[:, None] * (H * K) + o_k[None, :]
    o_dk = (first * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
    o_query, o_gate, o_output, output_base, m_query, m_gate = o_qk, o_dk, o_cv, v_base, m_c, m_c
    if MICRO_STEPS > 1:
        first_token, o_token, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        o_query = (first_token * H + key_head(i_h, H, HV, GROUPED)) * K + o_token[:, None] * (H * K) + o_k[None, :]
        o_gate = (first_token * HV + i_h) * K + o_token[:, None] * (HV * K) + o_k[None, :]
        output_base, o_output = (first_token * HV + i_h) * V, o_token[:, None] * (HV * V) + o_v[None, :]
        m_query, m_gate = m_c & ends, m_c & begins
    m_gate_k, m_query_k = m_gate[:, None] & m_k[None, :], m_query[:, None] & m_k[None, :]
    b_g = tl.load(log_decay + o_gate, mask=m_gate_k, other=0.0)
    b_k = tl.trans(tl.load(k + o_qk, mask=m_ck, other=0.0))
    b_e = b_k
    if erase_key is not None:
        b_e = tl.trans(tl.load(erase_key + o_qk, mask=m_ck, other=0.0))
    W_P = tl.load(p_W)
    o_vk = o_v[:, None] * K + o_k[None, :]
    b_dq = tl.zeros([BK, C], dtype=tl.float32)  # S dO^T
    b_col = tl.zeros([BK, C], dtype=tl.float32)  # dS U^T
    b_overlap = tl.zeros([BV, BK], dtype=tl.float32)  # <S, dS>, per value channel
    if HAS_BETA:
        b_row = tl.zeros([BK, C], dtype=tl.float32)  # S Z^T
    for i_v in tl.range(0, value_tiles, num_stages=STAGES):
        m_v = i_v * BV + o_v < V
        m_cv, m_vk = m_c[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
        m_ov = m_query[:, None] & m_v[None, :]
        b_dO = tl.load(d_output + output_base + i_v * BV + o_output, mask=m_ov, other=0.0)
        b_U = tl.load(U + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_S = tl.load(states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(d_states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dq = tl.dot(tl.trans(b_S), tl.trans(b_dO), b_dq, input_precision=PRECISION)
        if HAS_BETA:
            b_Z = tl.load(Z + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_row = tl.dot(tl.trans(b_S), tl.trans(b_Z), b_row, input_precision=PRECISION)
        b_overlap += b_S.to(tl.float32) * b_dS.to(tl.float32)
        b_col = tl.dot(tl.trans(b_dS), tl.trans(b_U), b_col, input_precision=PRECISION)

    b_q = tl.trans(tl.load(q + o_query, mask=m_query_k, other=0.0))
    b_diagonal = tl.load(P_diagonal + o_c)[None, :]
    if HAS_BETA:
        W_L = tl.load(p_W + C * C)
        b_beta = tl.load(beta + slot * C + o_c)[None, :]
    # W_P is strictly lower, so its zeros are those of the mask, which has the same layout in registers.
    later = tl.where(o_c[:, None] >= o_c[None, :], 1.0, W_P)
    # Without `where` the compiler would split the operands of this sum once per warp.
    b_g = tl.maximum(b_g.to(tl.float32) * LOG2E, LOG2_FLOOR)
    b_g = tl.where(m_c[None, :], tl.trans(b_g), 0.0)
    b_G = exact_sum(b_g, tl.trans(later))
    entry = tl.exp2(b_G)
    if STRONG:
        RANGE: tl.constexpr = exponent_range(tl.float32)
        undone, direct = tl.exp2(tl.minimum(-b_G, RANGE)), tl.min(b_G, 0) >= -RANGE
    else:
        undone = tl.exp2(-b_G)
    k_written = b_k * undone
    b_col *= tl.exp2(exact_sum(b_g, o_c[:, None] > o_c[None, :]))
    b_last = tl.sum(b_k * b_col, 1)

    if STRONG:  # pairs whose later token is out of range take the levels
        W_P = tl.where(direct[:, None], W_P, 0.0)
        if HAS_BETA:
            W_L = tl.where(direct[:, None], W_L, 0.0)
    b_dq = entry * tl.dot(k_written, tl.trans(W_P), b_dq * scale, input_precision=PRECISION)
    if HAS_BETA:
        # The row parts of dL and of the state both enter as `beta o row`; their products with k give d_beta.
        b_row = entry * tl.dot(k_written, tl.trans(W_L), -b_row, input_precision=PRECISION)
    b_pairs = tl.dot(b_q * entry, W_P, input_precision=PRECISION)
    if HAS_BETA:
        b_pairs = tl.dot(b_beta * b_e * entry, W_L, b_pairs, input_precision=PRECISION)
    b_col += undone * b_pairs

    if STRONG:
        for level in tl.range(6, num_stages=1):
            tl.debug_barrier()  # the compiler would load W once for all levels, and spill it
            middle = (o_c >> (level + 1) << (level + 1)) + (1 << level) - 1
            low, high = tl.minimum(o_c, middle)[None, :], tl.maximum(o_c, middle)[None, :]
            f = tl.exp2(exact_sum(b_g, (o_c[:, None] > low) & (o_c[:, None] <= high)))
            pairs = level_mask(o_c, level) & (direct == 0)[:, None]
            k_f = b_k * f
            W_f = tl.where(pairs, tl.load(p_W), 0.0)
            b_dq += f * tl.dot(k_f, tl.trans(W_f), input_precision=PRECISION)
            b_col += f * tl.dot(b_q * f, W_f, input_precision=PRECISION)
            if HAS_BETA:
                W_f = tl.where(pairs, tl.load(p_W + C * C), 0.0)
                e_f = k_f
                if erase_key is not None:
                    e_f = b_e * f
                b_row += f * tl.dot(k_f, tl.trans(W_f), input_precision=PRECISION)
                b_col += f * tl.dot(b_beta * e_f, W_f, input_precision=PRECISION)

    b_dk, b_dG = b_col, b_q * b_dq - b_k * b_col
    part = tl.zeros([C], dtype=tl.float32)
    if HAS_BETA:
        part += tl.sum(b_e * b_row, 0)
        b_row *= b_beta
        if erase_key is None:
            b_dk += b_row
        else:
            tl.store(d_erase_key + o_dk, tl.trans(b_row).to(d_erase_key.dtype.element_ty), mask=m_ck)
        b_dG += b_e * b_row
    b_dq += b_diagonal * b_k
    b_dk += b_diagonal * b_q
    tl.store(dq + o_gate, tl.trans(b_dq).to(dq.dtype.element_ty), mask=m_query_k)
    tl.store(dk + o_dk, tl.trans(b_dk).to(dk.dtype.element_ty), mask=m_ck)
    b_dg = exact_sum(b_dG, later)
    b_dg += b_last[:, None] + (tl.exp2(g_last) * tl.sum(b_overlap, 0))[:, None]
    if STRONG:
        keeps = tl.load(log_decay + o_gate, mask=m_gate_k, other=0.0).to(tl.float32) > float("-inf")
        b_dg = tl.where(tl.trans(keeps), b_dg, 0.0)
    tl.store(d_log_decay + o_gate, tl.trans(b_dg), mask=m_gate_k)
    return part


@triton.jit(do_not_specialize=["key_tiles", "value_tiles", "chunks", "slots", "T", "NT", "H", "HV"])
def chunk_gradients_levels_kernel(
    q, k, erase_key, v, beta, log_decay, G, strong_decay, U, Z, d_output, states, d_states, P_diagonal, dq, dk,
    d_erase_key, dv, d_beta, d_log_decay, W, cu_seqlens, chunk_sequence, chunk_offsets, scale, key_tiles, value_tiles,
    chunks, slots, T, NT, H, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    EXACT: tl.constexpr, STRONG: tl.constexpr, HAS_BETA: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Gradients of the chunks whose decay is too strong for one matrix product (`STRONG`); with EXACT also of others.

    One program handles up to 16 neighbouring `chunks`, of `slots` in all. W and `P_diagonal` are scratch memory for one
    chunk of each program. Grid (programs,).
    """
    start, o = tl.program_id(0).to(tl.int64) * chunks, tl.arange(0, 16)
    count = tl.minimum(slots - start, chunks).to(tl.int32)
    flags = tl.load(strong_decay + start + o, mask=o < count, other=0)
    if EXACT:
        found = tl.max(((flags == 2) == STRONG).to(tl.int32) * (o < count), 0)
    else:
        found = tl.max((flags == 2).to(tl.int32), 0)
    if found == 0:
        return
    W += tl.program_id(0).to(tl.int64) * ((2 if HAS_BETA else 1) * C * C)
    P_diagonal += tl.program_id(0) * C
    o_c = tl.arange(0, C)
    for i in tl.range(0, count, num_stages=1):
        slot = start + i
        i_h, i_t, i_b = (slot % HV).to(tl.int32), (slot // HV % NT).to(tl.int32), slot // HV // NT
        first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
        if EXACT:
            chosen = rows > 0 and (tl.load(strong_decay + slot) == 2) == STRONG
        else:
            chosen = rows > 0 and tl.load(strong_decay + slot) == 2
        if chosen:
            b_dbeta, stored = pair_gradients(
                v, beta, U, Z, d_output, W, P_diagonal, dv, d_beta, slot, first, rows, i_h, scale, value_tiles, HV, V,
                BV, C, HAS_BETA, PRECISION, STAGES, MICRO_STEPS, not EXACT,
            )  # fmt: skip
            for i_k in tl.range(0, key_tiles, num_stages=1):
                if EXACT:
                    b_dbeta += exact_gradients_of_tile(
                        q, k, erase_key, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk,
                        d_erase_key, d_log_decay, slot, first, rows, i_h, i_k, scale, value_tiles, H, HV, K, V, BK, BV,
                        C, STRONG, HAS_BETA, GROUPED, PRECISION, STAGES, MICRO_STEPS,
                    )  # fmt: skip
                else:
                    nothing = tl.load(strong_decay + slot) - 2
                    b_dbeta += gradients_of_tile(
                        q, k, erase_key, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk,
                        d_erase_key, d_log_decay, slot, first, rows, i_h, i_k, nothing, scale, value_tiles, H, HV, K, V,
                        BK, BV, C, HAS_BETA, GROUPED, PRECISION, STAGES, MICRO_STEPS,
                    )  # fmt: skip
            if HAS_BETA:
                tl.store(d_beta + first * HV + i_h + o_c * HV, b_dbeta, mask=(o_c < rows) & (stored == 0))


@per_plan
def _constants(plan: Plan, exact: bool, strong: bool) -> Constants:
    tiles = plan.tiles.gradients if exact else plan.tiles.gradients_strong
    grid, neighbours = plan.neighbour_grid() if strong else ((plan.slots,), dict(chunks=1, slots=plan.slots))
    return Constants(*grid, EXACT=exact, STRONG=int(strong), **neighbours, **gradient_arguments(plan, tiles))


def launch_gradients_levels(p: Problem, tensors: tuple[Tensor | None, ...]) -> None:
    """Fill the gradients of chunks with strong decay, and in float32 of all others before, from the tensors of
    `backward.of_chunks`."""
    exact = not p.plan.half
    for strong in (False, True) if exact else (True,):
        constants = _constants(p.plan, exact, strong)
        launch(
            chunk_gradients_levels_kernel, constants, *tensors,
            p.q.new_empty(constants.grid[0], p.plan.matrices, CHUNK, CHUNK),  # in no variable: freed before the next
            *p.chunk_offsets,
        )  # fmt: skip
