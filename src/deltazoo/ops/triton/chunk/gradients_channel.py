"""The gradients of a chunk's inputs for one decay per key channel, of 16-bit inputs, if one product spans the decay."""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head, tokens_of
from deltazoo.ops.triton.chunk.decay_factors import LOG2_FLOOR, LOG2E, masked_sum, middle_of
from deltazoo.ops.triton.chunk.gradients import gradient_arguments
from deltazoo.ops.triton.chunk.score_gradients import load_values, score_gradients, store_step_gradient
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Problem


@triton.jit(do_not_specialize=["key_tiles", "value_tiles", "T", "NT", "H", "HV"])
def chunk_gradients_channel_kernel(
    q, k, erase_key, v, beta, log_decay, G, strong_decay, U, Z, d_output, states, d_states, P_diagonal, dq, dk,
    d_erase_key, dv, d_beta, d_log_decay, cu_seqlens, chunk_sequence, chunk_offsets, scale, key_tiles, value_tiles, T,
    NT, H, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HAS_BETA: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one value head, unless its decay is too strong; grid (HV, NT, B).

    The kernel is `chunk_gradients_kernel` with the decay inside the products over tokens: `exp(G - middle)` where a
    token reads, `exp(middle - G)` where it is read (`middle_of`). dq, dk and `d_erase_key` are per value head.
    """
    WHOLE: tl.constexpr = V <= BV
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    if rows <= 0 or tl.load(strong_decay + slot) == 2:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_c = o_c < rows
    values, gates = (first * HV + i_h) * V, (first * HV + i_h) * K
    keys = (first * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else gates
    queries, token_gates, outputs = keys, gates, values
    if MICRO_STEPS > 1:
        first_token, o_token, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        token_gates, outputs = (first_token * HV + i_h) * K, (first_token * HV + i_h) * V
        queries = (first_token * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else token_gates
    d_output, U, Z, v, dv = d_output + outputs, U + values, Z + values, v + values, dv + values
    q, k, dq, dk = q + queries, k + keys, dq + token_gates, dk + gates
    if erase_key is not None:
        erase_key, d_erase_key = erase_key + keys, d_erase_key + gates
    log_decay, d_log_decay, G = log_decay + token_gates, d_log_decay + token_gates, G + slot * K
    states, d_states = states + slot * (K * V), d_states + slot * (K * V)
    o_cv, o_vk = o_c[:, None] * (HV * V) + o_v[None, :], o_v[:, None] * K + o_k[None, :]
    o_dk = o_c[:, None] * (HV * K) + o_k[None, :]
    o_qk = o_c[:, None] * (H * K) + o_k[None, :] if GROUPED else o_dk
    # Offsets of the queries, decays and outputs of the rows, and masks of the rows that have them.
    o_query, o_gate, o_output, m_query, m_gate = o_qk, o_dk, o_cv, m_c, m_c
    if MICRO_STEPS > 1:
        o_output = o_token[:, None] * (HV * V) + o_v[None, :]
        o_gate = o_token[:, None] * (HV * K) + o_k[None, :]
        o_query = o_token[:, None] * (H * K) + o_k[None, :] if GROUPED else o_gate
        m_query, m_gate = m_c & ends, m_c & begins
    b_beta = tl.load(beta + slot * C + o_c) if HAS_BETA else o_c

    b_dO, b_U, b_Z, b_dP, b_dL, b_dbeta = score_gradients(
        v, dv, d_output, U, Z, b_beta, o_cv, o_output, o_v, m_c, m_query, value_tiles, V, BV, WHOLE, HAS_BETA,
        PRECISION, STAGES,
    )  # fmt: skip

    # The diagonal goes through memory, so that the compiler is free to choose the registers that it is loaded into.
    above, below = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    b_dP *= scale
    tl.store(P_diagonal + slot * C + o_c, tl.sum(tl.where(above | below, 0.0, b_dP), 1))
    tl.debug_barrier()
    diagonal = tl.load(P_diagonal + slot * C + o_c)[:, None]
    W_P = tl.where(below, b_dP, 0.0).to(DTYPE)
    W_P_columns = tl.trans(W_P)
    if HAS_BETA:
        stored = store_step_gradient(d_beta + first * HV + i_h + o_c * HV, b_beta, b_dL, m_c)
    W_L = tl.where(below, -b_dL, 0.0).to(DTYPE)
    W_L_columns = tl.trans(W_L)
    later = tl.where(above, 0.0, 1.0).to(DTYPE)

    m_ck = m_c[:, None] & (o_k < K)[None, :]
    next_g = tl.load(log_decay + o_gate, mask=m_gate[:, None] & (o_k < K)[None, :], other=0.0)
    next_k = tl.load(k + o_qk, mask=m_ck, other=0.0)
    next_q = tl.load(q + o_query, mask=m_query[:, None] & (o_k < K)[None, :], other=0.0)
    if erase_key is not None:
        next_e = tl.load(erase_key + o_qk, mask=m_ck, other=0.0)
    for i_k in tl.range(0, key_tiles, num_stages=STAGES if WHOLE else 1):
        m_k = i_k * BK + o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        b_g, b_k, b_q = next_g, next_k, next_q
        b_e = b_k if erase_key is None else next_e
        g_last = tl.load(G + i_k * BK + o_k, mask=m_k, other=0.0)
        middle = middle_of(g_last)
        to_middle, from_middle = tl.exp2(middle)[None, :], tl.exp2(g_last - middle)[None, :]
        b_dq, b_row = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
        b_col, b_last = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([BK], dtype=tl.float32)
        if WHOLE:
            m_vk = (o_v < V)[:, None] & m_k[None, :]
            b_S = tl.load(states + i_k * BK + o_vk, mask=m_vk, other=0.0)
            b_dS = tl.load(d_states + i_k * BK + o_vk, mask=m_vk, other=0.0)
            b_last += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        else:
            for i_v in tl.range(0, value_tiles, num_stages=STAGES):
                m_v = i_v * BV + o_v < V
                o_tile, m_vk = i_v * BV * K + i_k * BK + o_vk, m_v[:, None] & m_k[None, :]
                dO_tile, U_tile, Z_tile = load_values(
                    d_output, U, Z, i_v * BV + o_output, m_query[:, None] & m_v[None, :],
                    i_v * BV + o_cv, m_c[:, None] & m_v[None, :],
                )  # fmt: skip
                b_S = tl.load(states + o_tile, mask=m_vk, other=0.0)
                b_dS = tl.load(d_states + o_tile, mask=m_vk, other=0.0)
                b_last += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
                b_dq = tl.dot(dO_tile, b_S, b_dq, input_precision=PRECISION)
                if HAS_BETA:
                    b_row = tl.dot(Z_tile, b_S, b_row, input_precision=PRECISION)
                b_col = tl.dot(U_tile, b_dS, b_col, input_precision=PRECISION) + 0.0  # waits, see `score_gradients`
        b_last *= tl.exp2(g_last)
        b_g = tl.where(m_c[:, None], tl.maximum(b_g.to(tl.float32) * LOG2E, LOG2_FLOOR), 0.0)
        b_G = masked_sum(later, b_g)
        b_G -= middle[None, :]
        entry, undone = tl.exp2(b_G), tl.exp2(-b_G)
        k_written = (b_k * undone).to(DTYPE)

        if WHOLE:
            b_dq = tl.dot(b_dO, b_S, b_dq, input_precision=PRECISION)
        b_dq = entry * tl.dot(W_P, k_written, b_dq * (scale * to_middle), input_precision=PRECISION)
        b_dG = b_q * b_dq
        b_dq += diagonal * b_k
        tl.store(dq + i_k * BK + o_gate, b_dq.to(dq.dtype.element_ty), mask=m_query[:, None] & m_k[None, :])

        b_dk = diagonal * b_q
        if WHOLE:
            b_col = tl.dot(b_U, b_dS, b_col, input_precision=PRECISION)
        b_col *= from_middle  # the decay to the chunk's end, with `undone`
        b_last += tl.sum(k_written.to(tl.float32) * b_col, 0)
        b_col = tl.dot(W_P_columns, (b_q * entry).to(DTYPE), b_col, input_precision=PRECISION)
        if HAS_BETA:
            if WHOLE:
                b_row = tl.dot(b_Z, b_S, b_row, input_precision=PRECISION)
            b_row = entry * tl.dot(W_L, k_written, -to_middle * b_row, input_precision=PRECISION)
            b_dbeta += tl.sum(b_e * b_row, 1)
            b_row *= b_beta[:, None]
            b_dG += b_e * b_row
            if erase_key is None:
                b_dk += b_row
            else:
                tl.store(d_erase_key + i_k * BK + o_dk, b_row.to(d_erase_key.dtype.element_ty), mask=m_ck)
            e_read = (b_beta[:, None] * b_e * entry).to(DTYPE)
            b_col = tl.dot(W_L_columns, e_read, b_col, input_precision=PRECISION)
        b_col *= undone
        b_dG -= b_k * b_col
        b_dk += b_col
        tl.store(dk + i_k * BK + o_dk, b_dk.to(dk.dtype.element_ty), mask=m_ck)
        m_next_k = ((i_k + 1) * BK + o_k < K)[None, :]
        m_next = m_c[:, None] & m_next_k
        next_g = tl.load(log_decay + (i_k + 1) * BK + o_gate, mask=m_gate[:, None] & m_next_k, other=0.0)
        next_k = tl.load(k + (i_k + 1) * BK + o_qk, mask=m_next, other=0.0)
        next_q = tl.load(q + (i_k + 1) * BK + o_query, mask=m_query[:, None] & m_next_k, other=0.0)
        if erase_key is not None:
            next_e = tl.load(erase_key + (i_k + 1) * BK + o_qk, mask=m_next, other=0.0)
        if tl.float16 == DTYPE:  # gradients may exceed its range
            b_dg = tl.cumsum(b_dG, 0, reverse=True)
        else:
            b_dg = masked_sum(tl.trans(later), b_dG)
        b_dg += b_last[None, :]
        tl.store(d_log_decay + i_k * BK + o_gate, b_dg, mask=m_gate[:, None] & m_k[None, :])

    if HAS_BETA:
        tl.store(d_beta + first * HV + i_h + o_c * HV, b_dbeta, mask=m_c & (stored == 0))


@per_plan
def _constants(plan: Plan) -> Constants:
    return Constants(*plan.chunk_grid(), **gradient_arguments(plan, plan.tiles.gradients))


def launch_gradients_channel(p: Problem, tensors: tuple[Tensor | None, ...]) -> None:
    """Fill the gradients of chunks without strong decay, from the tensors of `backward.of_chunks`."""
    launch(chunk_gradients_channel_kernel, _constants(p.plan), *tensors, *p.chunk_offsets)
