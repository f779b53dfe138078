"""The chunk-parallel end of the backward pass for one decay per key channel, in two steps.

`pair_gradients_kernel` makes what needs no key channels: the gradients of the scores P and L of every pair of tokens,
dv, and the values' part of d_beta. `tail_channel_kernel` makes the rest, for a tile of key channels each.
"""

import triton
import triton.language as tl

from deltazoo.ops.triton.layout import chunk_bounds, key_head
from deltazoo.ops.triton.prepare import (
    is_far,
    level_factor,
    level_mask,
    log2_decay,
    masked_sum,
    three_terms,
    undo_decay,
)


@triton.jit(do_not_specialize=["value_tiles", "T", "NT", "HV"])
def pair_gradients_kernel(
    v,
    beta,
    U,
    Z,
    d_output,
    W,
    P_diagonal,
    dv,
    d_beta,
    cu_seqlens,
    chunk_sequence,
    chunk_offsets,
    scale,
    value_tiles,
    T,
    NT,
    HV,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of the scores of one chunk, dv, and the share of d_beta that comes from the values; grid (HV, NT, B).

    W holds the strictly lower parts of dP, with the scale, and (with beta) dL; `P_diagonal` the diagonal of dP.
    The number of value tiles is read at run time, as in `tail_kernel`, and each trip waits for its products.
    """
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    if rows <= 0:
        return
    o_c, o_v = tl.arange(0, C), tl.arange(0, BV)
    m_c = o_c < rows
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    v_base = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    if HAS_BETA:
        b_beta = tl.load(beta + slot * C + o_c)
        b_dL = tl.zeros([C, C], dtype=tl.float32)
        b_dbeta = tl.zeros([C], dtype=tl.float32)
    for i_v in tl.range(0, value_tiles, num_stages=STAGES):
        m_cv = m_c[:, None] & (i_v * BV + o_v < V)[None, :]
        o_tile = v_base + i_v * BV + o_cv
        b_dO = tl.load(d_output + o_tile, mask=m_cv, other=0.0)
        b_U = tl.load(U + o_tile, mask=m_cv, other=0.0)
        b_Z = tl.load(Z + o_tile, mask=m_cv, other=0.0)
        if HAS_BETA:
            b_v = tl.load(v + o_tile, mask=m_cv, other=0.0)
            b_dL = tl.dot(b_Z, tl.trans(b_U), b_dL, input_precision=PRECISION)
            b_dbeta += tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
            b_dv = b_beta[:, None] * b_Z.to(tl.float32)
        else:
            b_dv = b_Z
        tl.store(dv + o_tile, b_dv.to(dv.dtype.element_ty), mask=m_cv)
        b_dP = tl.dot(b_dO, tl.trans(b_U), b_dP, input_precision=PRECISION) + 0.0

    TERMS: tl.constexpr = 2 if HAS_BETA else 1
    W += slot * (TERMS * C * C)
    o_cc = o_c[:, None] * C + o_c[None, :]
    below = o_c[:, None] > o_c[None, :]
    b_dP *= scale
    tl.store(W + o_cc, tl.where(below, b_dP, 0.0).to(W.dtype.element_ty))
    tl.store(P_diagonal + slot * C + o_c, tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_dP, 0.0), 1))
    if HAS_BETA:
        tl.store(W + C * C + o_cc, tl.where(below, -b_dL, 0.0).to(W.dtype.element_ty))
        tl.store(d_beta + first * HV + i_h + o_c * HV, b_dbeta, mask=m_c)


@triton.jit
def sum_of_later(x, o_c, DTYPE: tl.constexpr):
    """Each row's sum with all rows after it, on the matrix unit: in two terms, or in float32 if the inputs are."""
    M = (o_c[None, :] >= o_c[:, None]).to(DTYPE)
    if tl.float16 == DTYPE:  # gradients may leave its range
        out = tl.cumsum(x, 0, reverse=True)
    elif tl.float32 == DTYPE:
        out = tl.dot(M, x, input_precision="tf32x3")
    else:
        hi = x.to(DTYPE)
        out = tl.dot(M, hi, tl.dot(M, (x - hi.to(tl.float32)).to(DTYPE)))
    return out


@triton.jit
def tail_channel(
    q,
    k,
    beta,
    log_decay,
    G,
    U,
    Z,
    d_output,
    states,
    d_states,
    W,
    P_diagonal,
    dq,
    dk,
    d_beta,
    d_log_decay,
    cu_seqlens,
    chunk_sequence,
    chunk_offsets,
    scale,
    shares_stride,
    value_tiles,
    T,
    NT,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    FAR: tl.constexpr,
    HAS_BETA: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of one tile; with FAR some of its channels decay out of the range of `undo_decay`."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k, i_h, i_t, i_b = tl.program_id(0) % NK, tl.program_id(0) // NK, tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
    m_c, m_k = o_c < rows, o_k < K
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    g_last = tl.load(G + slot * K + o_k, mask=m_k, other=0.0)
    m_ck = m_c[:, None] & m_k[None, :]
    v_base = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_vk = o_v[:, None] * K + o_k[None, :]

    b_dq = tl.zeros([C, BK], dtype=tl.float32)  # dO S^T
    b_kc = tl.zeros([C, BK], dtype=tl.float32)  # U dS^T
    b_overlap = tl.zeros([BK], dtype=tl.float32)  # <S, dS>
    if HAS_BETA:
        b_row = tl.zeros([C, BK], dtype=tl.float32)  # Z S^T
    for i_v in tl.range(0, value_tiles, num_stages=STAGES):
        m_v = i_v * BV + o_v < V
        m_cv, m_vk = m_c[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
        b_dO = tl.load(d_output + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_U = tl.load(U + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_S = tl.load(states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(d_states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dq = tl.dot(b_dO, b_S, b_dq, input_precision=PRECISION)
        if HAS_BETA:
            b_Z = tl.load(Z + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_row = tl.dot(b_Z, b_S, b_row, input_precision=PRECISION)
        b_overlap += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        # As in `tail_kernel`: the sum makes the trip wait for its products, whose operands the next copies overwrite.
        b_kc = tl.dot(b_U, b_dS, b_kc, input_precision=PRECISION) + 0.0

    o_qk = (first * H + key_head(i_h, H, HV, GROUPED)) * K + o_c[:, None] * (H * K) + o_k[None, :]
    o_dk = (first * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
    p_W = W + slot * ((2 if HAS_BETA else 1) * C * C) + o_c[:, None] * C + o_c[None, :]
    b_diagonal = tl.load(P_diagonal + slot * C + o_c)[:, None]
    b_g = log2_decay(log_decay + o_dk, m_ck)
    g1, g2, g3 = three_terms(b_g, DTYPE)
    b_G = masked_sum(o_c[None, :] <= o_c[:, None], g1, g2, g3)
    b_k = tl.load(k + o_qk, mask=m_ck, other=0.0)
    b_q = tl.load(q + o_qk, mask=m_ck, other=0.0)
    entry = tl.exp2(b_G)
    undone, direct = undo_decay(b_G, DTYPE)
    k_written = (b_k * undone).to(DTYPE)
    m_W = direct[:, None] if FAR else (o_c < C)[:, None]
    EXACT: tl.constexpr = FAR or tl.float32 == DTYPE
    if EXACT:
        b_kc *= tl.exp2(masked_sum(o_c[None, :] > o_c[:, None], g1, g2, g3))
        b_last = tl.sum(b_k.to(tl.float32) * b_kc, 0)
        b_pairs = tl.zeros([C, BK], dtype=tl.float32)
    else:  # the decay to the chunk's end is the whole one times `undone`, as good as 16 bits
        b_pairs = b_kc * tl.exp2(g_last)[None, :]
        b_last = tl.sum(b_k * undone * b_pairs, 0)
    b_last += tl.exp2(g_last) * b_overlap

    W_P = tl.load(p_W, mask=m_W, other=0.0)
    b_dq = entry * tl.dot(W_P, k_written, b_dq * scale, input_precision=PRECISION) + b_diagonal * b_k
    b_pairs = tl.dot(tl.trans(W_P), (b_q * entry).to(DTYPE), b_pairs, input_precision=PRECISION)
    if HAS_BETA:
        # Row terms of dL and of the state's share both enter as `beta o row`, and their products with k make d_beta.
        b_beta = tl.load(beta + slot * C + o_c)[:, None]
        W_L = tl.load(p_W + C * C, mask=m_W, other=0.0)
        b_row = entry * tl.dot(W_L, k_written, -b_row, input_precision=PRECISION)
        b_pairs = tl.dot(tl.trans(W_L), (b_beta * b_k * entry).to(DTYPE), b_pairs, input_precision=PRECISION)
    b_pairs = undone * b_pairs + b_diagonal * b_q
    b_kc = b_kc + b_pairs if EXACT else b_pairs

    if FAR:
        for level in tl.range(6, num_stages=1):
            f = level_factor(g1, g2, g3, o_c, level)
            pairs = level_mask(o_c, level) & (direct == 0)[:, None]
            k_f = b_k * f
            W_f = tl.where(pairs, tl.load(p_W), 0.0).to(DTYPE)
            b_dq += f * tl.dot(W_f, k_f.to(DTYPE), input_precision=PRECISION)
            b_kc += f * tl.dot(tl.trans(W_f), (b_q * f).to(DTYPE), input_precision=PRECISION)
            if HAS_BETA:
                W_f = tl.where(pairs, tl.load(p_W + C * C), 0.0).to(DTYPE)
                b_row += f * tl.dot(W_f, k_f.to(DTYPE), input_precision=PRECISION)
                b_kc += f * tl.dot(tl.trans(W_f), (b_beta * k_f).to(DTYPE), input_precision=PRECISION)

    b_dk, b_dG = b_kc, b_q * b_dq - b_k * b_kc
    if HAS_BETA:
        tl.store(
            d_beta + i_k.to(tl.int64) * shares_stride + first * HV + i_h + o_c * HV,
            tl.sum(b_k.to(tl.float32) * b_row, 1),
            mask=m_c,
        )
        b_dk += b_beta * b_row
        b_dG += b_beta * b_k * b_row
    tl.store(dq + o_dk, b_dq.to(dq.dtype.element_ty), mask=m_ck)
    tl.store(dk + o_dk, b_dk.to(dk.dtype.element_ty), mask=m_ck)
    b_dG += tl.where((o_c == C - 1)[:, None], b_last[None, :], 0.0)
    keeps = tl.load(log_decay + o_dk, mask=m_ck, other=0.0).to(tl.float32) > float("-inf")
    tl.store(d_log_decay + o_dk, tl.where(keeps, sum_of_later(b_dG, o_c, DTYPE), 0.0), mask=m_ck)


@triton.jit(do_not_specialize=["shares_stride", "value_tiles", "T", "NT", "H", "HV"])
def tail_channel_kernel(
    q,
    k,
    beta,
    log_decay,
    G,
    U,
    Z,
    d_output,
    states,
    d_states,
    W,
    P_diagonal,
    dq,
    dk,
    d_beta,
    d_log_decay,
    cu_seqlens,
    chunk_sequence,
    chunk_offsets,
    scale,
    shares_stride,
    value_tiles,
    T,
    NT,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_BETA: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk, d_log_decay and a share of d_beta for BK key channels of one chunk; grid (K / BK * HV, NT, B).

    dq and dk are per value head; each tile of channels stores its share of d_beta, `[K / BK, B, T, HV]`. Tiles of
    strong decay take a way of their own through the kernel: they need more registers than there are, the others do not.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_h, i_t, i_b = tl.program_id(0) // NK, tl.program_id(1), tl.program_id(2)
    _, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    if rows <= 0:
        return
    o_k = tl.program_id(0) % NK * BK + tl.arange(0, BK)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    g_last = tl.load(G + slot * K + o_k, mask=o_k < K, other=0.0)
    if is_far(g_last, q.dtype.element_ty):
        tail_channel(
            q,
            k,
            beta,
            log_decay,
            G,
            U,
            Z,
            d_output,
            states,
            d_states,
            W,
            P_diagonal,
            dq,
            dk,
            d_beta,
            d_log_decay,
            cu_seqlens,
            chunk_sequence,
            chunk_offsets,
            scale,
            shares_stride,
            value_tiles,
            T,
            NT,
            H,
            HV,
            K,
            V,
            BK,
            BV,
            C,
            True,
            HAS_BETA,
            GROUPED,
            PACKED,
            PRECISION,
            STAGES,
        )
    else:
        tail_channel(
            q,
            k,
            beta,
            log_decay,
            G,
            U,
            Z,
            d_output,
            states,
            d_states,
            W,
            P_diagonal,
            dq,
            dk,
            d_beta,
            d_log_decay,
            cu_seqlens,
            chunk_sequence,
            chunk_offsets,
            scale,
            shares_stride,
            value_tiles,
            T,
            NT,
            H,
            HV,
            K,
            V,
            BK,
            BV,
            C,
            False,
            HAS_BETA,
            GROUPED,
            PACKED,
            PRECISION,
            STAGES,
        )
