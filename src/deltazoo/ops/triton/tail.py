"""The chunk-parallel end of the backward pass: from U, Z, S and dS of a chunk to the gradients of its inputs."""

import triton
import triton.language as tl

from deltazoo.ops.triton.layout import chunk_bounds, key_head


@triton.jit
def packed_load(pointers, mask):
    """A tile, with pairs of 16-bit elements as integers: loops carry those as loaded, and wait for them where used."""
    x = tl.load(pointers, mask=mask, other=0.0)
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True).to(tl.uint32), [x.shape[0], x.shape[1] // 2, 2]))
        x = low | (high << 16)
    return x


@triton.jit
def unpacked(x, DTYPE: tl.constexpr):
    """The tile that `packed_load` loaded."""
    if DTYPE.primitive_bitwidth == 16:
        pairs = tl.join(x & 0xFFFF, x >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        x = tl.reshape(pairs, [x.shape[0], 2 * x.shape[1]])
    return x


@triton.jit
def from_values(v, dv, offsets, mask, b_beta, b_Z, HAS_BETA: tl.constexpr):
    """Stores dv of a tile of value channels; its part of d_beta."""
    if HAS_BETA:
        b_v = tl.load(v + offsets, mask=mask, other=0.0)
        part = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
        b_dv = b_beta[:, None] * b_Z.to(tl.float32)
    else:
        part = tl.zeros([b_Z.shape[0]], dtype=tl.float32)
        b_dv = b_Z
    tl.store(dv + offsets, b_dv.to(dv.dtype.element_ty), mask=mask)
    return part


@triton.jit
def partial_overlap(b_S, b_dS):
    """<S, dS> of a tile in 128 sums: along rows of eight elements, and over rows far apart, which one thread holds."""
    BV: tl.constexpr = b_S.shape[0]
    COLUMNS: tl.constexpr = b_S.shape[1] // 8
    ROWS: tl.constexpr = BV if BV * COLUMNS < 128 else 128 // COLUMNS
    product = b_S.to(tl.float32) * b_dS.to(tl.float32)
    return tl.sum(tl.sum(tl.reshape(product, [BV // ROWS, ROWS, COLUMNS, 8]), 3), 0)


@triton.jit(do_not_specialize=["key_tiles", "value_tiles", "T", "NT", "H", "HV"])
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
    key_tiles,
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
    FORM: tl.constexpr = 0,
):
    """All gradients of one chunk of one value head; grid (HV, NT, B). dq and dk are per value head.

    First what needs no key channels: the gradients of the scores P and L, dv, and the values' part of d_beta. Then one
    tile of key channels after the other. Where all value channels fit into a tile, dO, U and Z are read once for all.

    The numbers of tiles, K / BK and V / BV, are read at run time: with a count that the compiler knows it may dissolve
    a loop, and the straight code is wrong on an H200 (docs/log.md).

    The gradient of the cumulative log-decay has one form for every kind of decay, `q o dq + k o dk_row - k o dk_col`:
    token i's own terms carry `exp(G_i)` where it reads and `exp(-G_i)` where it is read.
    """
    WHOLE: tl.constexpr = V <= BV
    AHEAD: tl.constexpr = FORM == 2 and WHOLE
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    if rows <= 0:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_c = o_c < rows
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    o_gate = first * HV + i_h + o_c * HV
    values, keys = (first * HV + i_h) * V, (first * H + key_head(i_h, H, HV, GROUPED)) * K
    d_output, U, Z, v, dv = d_output + values, U + values, Z + values, v + values, dv + values
    q, k, dq, dk = q + keys, k + keys, dq + (first * HV + i_h) * K, dk + (first * HV + i_h) * K
    states, d_states = states + slot * (K * V), d_states + slot * (K * V)
    o_cv, o_vk = o_c[:, None] * (HV * V) + o_v[None, :], o_v[:, None] * K + o_k[None, :]
    o_qk, o_dk = o_c[:, None] * (H * K) + o_k[None, :], o_c[:, None] * (HV * K) + o_k[None, :]
    b_beta = tl.load(beta + slot * C + o_c) if HAS_BETA else o_c

    if WHOLE:
        m_v = o_v < V
        m_cv = m_c[:, None] & m_v[None, :]
        b_dO = tl.load(d_output + o_cv, mask=m_cv, other=0.0)
        b_U = tl.load(U + o_cv, mask=m_cv, other=0.0)
        b_Z = tl.load(Z + o_cv, mask=m_cv, other=0.0)
        b_dbeta = from_values(v, dv, o_cv, m_cv, b_beta, b_Z, HAS_BETA)
        if AHEAD:
            m_ck, m_vk = m_c[:, None] & (o_k < K)[None, :], m_v[:, None] & (o_k < K)[None, :]
            next_S, next_dS = packed_load(states + o_vk, m_vk), packed_load(d_states + o_vk, m_vk)
            next_k, next_q = packed_load(k + o_qk, m_ck), packed_load(q + o_qk, m_ck)
        b_dP = tl.dot(b_dO, tl.trans(b_U), input_precision=PRECISION)
        if HAS_BETA:
            b_dL = tl.dot(b_Z, tl.trans(b_U), input_precision=PRECISION)
    else:
        b_dP = tl.zeros([C, C], dtype=tl.float32)
        b_dbeta = tl.zeros([C], dtype=tl.float32)
        if HAS_BETA:
            b_dL = tl.zeros([C, C], dtype=tl.float32)
        for i_v in tl.range(0, value_tiles, num_stages=STAGES):
            m_cv = m_c[:, None] & (i_v * BV + o_v < V)[None, :]
            b_dO = tl.load(d_output + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_U = tl.load(U + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_Z = tl.load(Z + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_dbeta += from_values(v, dv, i_v * BV + o_cv, m_cv, b_beta, b_Z, HAS_BETA)
            if HAS_BETA:
                b_dL = tl.dot(b_Z, tl.trans(b_U), b_dL, input_precision=PRECISION)
            # A sum with the last product makes the trip wait for all of its products. Without it they run on while the
            # next tile is copied over their operands: Triton has a single buffer for what registers read as well
            # (docs/log.md).
            b_dP = tl.dot(b_dO, tl.trans(b_U), b_dP, input_precision=PRECISION) + 0.0

    above, below = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    if DECAY == 1:
        b_G = tl.load(G + slot * C + o_c)
        D = tl.exp2(tl.where(above, 0.0, b_G[:, None] - b_G[None, :]))
        b_dP *= D
    W_P = tl.where(above, 0.0, b_dP * scale).to(DTYPE)
    if FORM == 1 and WHOLE:
        b_dP = tl.dot(b_U, tl.trans(b_dO), input_precision=PRECISION)
        if DECAY == 1:
            b_dP *= tl.exp2(tl.where(below, 0.0, b_G[None, :] - b_G[:, None]))
        W_P_columns = tl.where(below, 0.0, b_dP * scale).to(DTYPE)
    else:
        W_P_columns = tl.trans(W_P)
    if HAS_BETA:
        if DECAY == 1:
            b_dL *= D
        b_dL = tl.where(below, -b_dL, 0.0)
        W_L = b_dL.to(DTYPE)
        b_dL_beta = b_beta[:, None] * b_dL
        W_L_beta = b_dL_beta.to(DTYPE)
        if TERMS > 1:
            # Gradients of a weak decay and of beta are small differences of such sums: strict takes a second term.
            W_rest = (b_dL - W_L.to(tl.float32)).to(DTYPE)
            W_rest_beta = (b_dL_beta - W_L_beta.to(tl.float32)).to(DTYPE)
    if DECAY == 1:
        g_last = tl.load(G + slot * C + C - 1)
        entry, exit = tl.exp2(b_G)[:, None], tl.exp2(g_last - b_G)[:, None]
        b_dG = tl.zeros([C], dtype=tl.float32)
        b_last = tl.zeros([C], dtype=tl.float32)
        b_overlap = partial_overlap(tl.zeros([BV, BK], dtype=tl.float32), tl.zeros([BV, BK], dtype=tl.float32))

    for i_k in tl.range(0, key_tiles, num_stages=STAGES if WHOLE and not AHEAD else 1):
        m_k = i_k * BK + o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        if WHOLE:
            if AHEAD:
                b_S, b_dS = unpacked(next_S, DTYPE), unpacked(next_dS, DTYPE)
                b_k, b_q = unpacked(next_k, DTYPE), unpacked(next_q, DTYPE)
                if DECAY == 1:
                    b_overlap += partial_overlap(b_S, b_dS)
                n_k = (i_k + 1) * BK + o_k < K
                next_S = packed_load(states + (i_k + 1) * BK + o_vk, m_v[:, None] & n_k[None, :])
                next_dS = packed_load(d_states + (i_k + 1) * BK + o_vk, m_v[:, None] & n_k[None, :])
                next_k = packed_load(k + (i_k + 1) * BK + o_qk, m_c[:, None] & n_k[None, :])
                next_q = packed_load(q + (i_k + 1) * BK + o_qk, m_c[:, None] & n_k[None, :])
            else:
                m_vk = m_v[:, None] & m_k[None, :]
                b_S = tl.load(states + i_k * BK + o_vk, mask=m_vk, other=0.0)
                b_dS = tl.load(d_states + i_k * BK + o_vk, mask=m_vk, other=0.0)
                b_k = tl.load(k + i_k * BK + o_qk, mask=m_ck, other=0.0)
                b_q = tl.load(q + i_k * BK + o_qk, mask=m_ck, other=0.0)
                if DECAY == 1:
                    b_overlap += partial_overlap(b_S, b_dS)
            b_dq = tl.dot(b_dO, b_S, input_precision=PRECISION)
            b_kc = tl.dot(b_U, b_dS, input_precision=PRECISION)
            if HAS_BETA:
                b_row = tl.dot(b_Z, b_S, input_precision=PRECISION)
        else:
            b_k = tl.load(k + i_k * BK + o_qk, mask=m_ck, other=0.0)
            b_q = tl.load(q + i_k * BK + o_qk, mask=m_ck, other=0.0)
            b_dq = tl.zeros([C, BK], dtype=tl.float32)
            b_kc = tl.zeros([C, BK], dtype=tl.float32)
            if HAS_BETA:
                b_row = tl.zeros([C, BK], dtype=tl.float32)
            for i_v in tl.range(0, value_tiles, num_stages=STAGES):
                m_v = i_v * BV + o_v < V
                m_cv, m_vk = m_c[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
                b_S = tl.load(states + i_v * BV * K + i_k * BK + o_vk, mask=m_vk, other=0.0)
                b_dS = tl.load(d_states + i_v * BV * K + i_k * BK + o_vk, mask=m_vk, other=0.0)
                b_dO = tl.load(d_output + i_v * BV + o_cv, mask=m_cv, other=0.0)
                b_U = tl.load(U + i_v * BV + o_cv, mask=m_cv, other=0.0)
                if DECAY == 1:
                    b_overlap += partial_overlap(b_S, b_dS)
                b_dq = tl.dot(b_dO, b_S, b_dq, input_precision=PRECISION)
                if HAS_BETA:
                    b_Z = tl.load(Z + i_v * BV + o_cv, mask=m_cv, other=0.0)
                    b_row = tl.dot(b_Z, b_S, b_row, input_precision=PRECISION)
                b_kc = tl.dot(b_U, b_dS, b_kc, input_precision=PRECISION) + 0.0
        b_dq *= scale
        if DECAY == 1:
            b_dq *= entry
            b_kc *= exit
            b_last += tl.sum(b_k.to(tl.float32) * b_kc, 1)
        b_dq = tl.dot(W_P, b_k, b_dq, input_precision=PRECISION)
        tl.store(dq + i_k * BK + o_dk, b_dq.to(dq.dtype.element_ty), mask=m_ck)
        b_kc = tl.dot(W_P_columns, b_q, b_kc, input_precision=PRECISION)
        if DECAY == 1:
            b_dG += tl.sum(b_q.to(tl.float32) * b_dq, 1)
        if HAS_BETA:
            # Row terms of dL and of the state's share both enter as `beta o row`; their products with k make d_beta.
            b_row = -b_row * entry if DECAY == 1 else -b_row
            b_row = tl.dot(W_L, b_k, b_row, input_precision=PRECISION)
            b_kc = tl.dot(tl.trans(W_L_beta), b_k, b_kc, input_precision=PRECISION)
            if TERMS > 1:
                b_row = tl.dot(W_rest, b_k, b_row)
                b_kc = tl.dot(tl.trans(W_rest_beta), b_k, b_kc)
            k_row = tl.sum(b_k.to(tl.float32) * b_row, 1)
            b_dbeta += k_row
        if DECAY == 1:
            b_dG -= tl.sum(b_k.to(tl.float32) * b_kc, 1)
        if HAS_BETA:
            if DECAY == 1:
                b_dG += b_beta * k_row
            b_kc += b_beta[:, None] * b_row
        tl.store(dk + i_k * BK + o_dk, b_kc.to(dk.dtype.element_ty), mask=m_ck)

    if HAS_BETA:
        tl.store(d_beta + o_gate, b_dbeta, mask=m_c)
    if DECAY == 1:
        last = tl.sum(b_last, 0) + tl.exp2(g_last) * tl.sum(tl.sum(b_overlap, 1), 0)
        b_dG += tl.where(o_c == C - 1, last, 0.0)
        keeps = tl.load(log_decay + o_gate, mask=m_c, other=0.0).to(tl.float32) > float("-inf")
        tl.store(d_log_decay + o_gate, tl.where(keeps, tl.cumsum(b_dG, 0, reverse=True), 0.0), mask=m_c)
