"""The chunk-parallel end of the backward pass: from U, Z, S and dS of a chunk to the gradients of its inputs."""

import triton
import triton.language as tl

from deltazoo.ops.triton.layout import chunk_bounds, key_head


@triton.jit(do_not_specialize=["shares_stride", "value_tiles", "T", "NT", "H", "HV"])
def tail_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    G,
    U,
    Z,
    d_output,
    states,
    d_states,
    dq,
    dk,
    dv,
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
    DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr,
    TERMS: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All gradients of one chunk of one value head, BK key channels; grid (K / BK * HV, NT, B).

    dq and dk are per value head; d_beta and, per head, d_log_decay are sums over key channels, so each tile of channels
    stores its share, `[K / BK, B, T, HV]`. The number of value tiles, V / BV, is read from `value_tiles`: with
    a count that the compiler knows it may dissolve the loop, and the straight code is wrong on an H200 (docs/log.md).

    The gradient of the cumulative log-decay has one form for every kind of decay, `q o dq + k o dk_row - k o dk_col`:
    token i's own terms carry `exp(G_i)` where it reads and `exp(-G_i)` where it is read.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k, i_h, i_t, i_b = tl.program_id(0) % NK, tl.program_id(0) // NK, tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    if rows <= 0:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
    m_c, m_k = o_c < rows, o_k < K
    m_ck = m_c[:, None] & m_k[None, :]
    m_dv = o_c < tl.where(i_k == 0, rows, 0)  # dv needs no key channels: the first tile of them writes it
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    o_gate = first * HV + i_h + o_c * HV
    share = i_k.to(tl.int64) * shares_stride
    v_base = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_vk = o_v[:, None] * K + o_k[None, :]
    if HAS_BETA:
        b_beta = tl.load(beta + slot * C + o_c)

    b_dq = tl.zeros([C, BK], dtype=tl.float32)  # dO S^T
    b_kc = tl.zeros([C, BK], dtype=tl.float32)  # U dS^T
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    if DECAY == 1:
        b_overlap = tl.zeros([BV], dtype=tl.float32)  # <S, dS>, per value channel
    if HAS_BETA:
        b_row = tl.zeros([C, BK], dtype=tl.float32)  # Z S^T
        b_dL = tl.zeros([C, C], dtype=tl.float32)
        b_dbeta = tl.zeros([C], dtype=tl.float32)
    for i_v in tl.range(0, value_tiles, num_stages=STAGES):
        m_v = i_v * BV + o_v < V
        m_cv, m_write, m_vk = m_c[:, None] & m_v[None, :], m_dv[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
        b_dO = tl.load(d_output + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_U = tl.load(U + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_Z = tl.load(Z + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_S = tl.load(states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(d_states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dq = tl.dot(b_dO, b_S, b_dq, input_precision=PRECISION)
        b_kc = tl.dot(b_U, b_dS, b_kc, input_precision=PRECISION)
        if DECAY == 1:
            b_overlap += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
        if HAS_BETA:
            b_v = tl.load(v + v_base + i_v * BV + o_cv, mask=m_write, other=0.0)
            b_row = tl.dot(b_Z, b_S, b_row, input_precision=PRECISION)
            b_dL = tl.dot(b_Z, tl.trans(b_U), b_dL, input_precision=PRECISION)
            b_dbeta += tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
            b_dv = b_beta[:, None] * b_Z.to(tl.float32)
        else:
            b_dv = b_Z
        tl.store(dv + v_base + i_v * BV + o_cv, b_dv.to(dv.dtype.element_ty), mask=m_write)
        # A sum with the last product makes the trip wait for all of its products. Without it they run on while the next
        # tile is copied over their operands: Triton has a single buffer for what registers read as well (docs/log.md).
        b_dP = tl.dot(b_dO, tl.trans(b_U), b_dP, input_precision=PRECISION) + 0.0

    above, below = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    if DECAY == 1:
        b_G = tl.load(G + slot * C + o_c)
        D = tl.exp2(tl.where(above, 0.0, b_G[:, None] - b_G[None, :]))
        b_dP *= D
        if HAS_BETA:
            b_dL *= D
    W_P = tl.where(above, 0.0, b_dP * scale).to(DTYPE)
    if HAS_BETA:
        b_dL = tl.where(below, -b_dL, 0.0)
        W_L = b_dL.to(DTYPE)

    o_qk = (first * H + key_head(i_h, H, HV, GROUPED)) * K + o_c[:, None] * (H * K) + o_k[None, :]
    o_dk = (first * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
    b_k = tl.load(k + o_qk, mask=m_ck, other=0.0)
    b_q = tl.load(q + o_qk, mask=m_ck, other=0.0)
    if DECAY == 1:
        g_last = tl.load(G + slot * C + C - 1)
        entry, exit = tl.exp2(b_G)[:, None], tl.exp2(g_last - b_G)[:, None]
        b_dq *= entry
        b_kc *= exit
        b_last = tl.sum(tl.sum(b_k.to(tl.float32) * b_kc, 1), 0) + tl.exp2(g_last) * tl.sum(b_overlap, 0)
    b_dq *= scale
    if HAS_BETA:
        # Row terms of dL and of the state's share both enter as `beta o row`, and their products with k make d_beta.
        b_row = -b_row * entry if DECAY == 1 else -b_row

    b_dq = tl.dot(W_P, b_k, b_dq, input_precision=PRECISION)
    b_kc = tl.dot(tl.trans(W_P), b_q, b_kc, input_precision=PRECISION)
    if HAS_BETA:
        b_beta_k = (b_beta[:, None] * b_k).to(DTYPE)
        b_row = tl.dot(W_L, b_k, b_row, input_precision=PRECISION)
        b_kc = tl.dot(tl.trans(W_L), b_beta_k, b_kc, input_precision=PRECISION)
        if TERMS > 1:
            # Gradients of a weak decay and of beta are small differences of such sums: strict takes a second term.
            W_rest = (b_dL - W_L.to(tl.float32)).to(DTYPE)
            b_row = tl.dot(W_rest, b_k, b_row)
            b_kc = tl.dot(tl.trans(W_rest), b_beta_k, b_kc)
    if HAS_BETA:
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_row, 1)
        b_dk_row = b_beta[:, None] * b_row
    else:
        b_dk_row = tl.zeros([C, BK], dtype=tl.float32)

    tl.store(dq + o_dk, b_dq.to(dq.dtype.element_ty), mask=m_ck)
    tl.store(dk + o_dk, (b_dk_row + b_kc).to(dk.dtype.element_ty), mask=m_ck)
    if HAS_BETA:
        tl.store(d_beta + share + o_gate, b_dbeta, mask=m_c)
    if DECAY == 1:
        b_dG = tl.sum(b_q * b_dq + b_k * (b_dk_row - b_kc), 1) + tl.where(o_c == C - 1, b_last, 0.0)
        keeps = tl.load(log_decay + o_gate, mask=m_c, other=0.0).to(tl.float32) > float("-inf")
        b_dg = tl.where(keeps, tl.cumsum(b_dG, 0, reverse=True), 0.0)
        tl.store(d_log_decay + share + o_gate, b_dg, mask=m_c)
