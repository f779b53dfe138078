"""The chunk-parallel end of the backward pass for one decay per key channel, in two steps.

`pair_gradients_kernel` makes what needs no key channels: the gradients of the scores P and L of every pair of tokens,
dv, and the values' part of d_beta. `tail_channel_kernel` makes the rest, for a tile of key channels each.
"""

import triton
import triton.language as tl

from deltazoo.ops.triton.layout import chunk_bounds, key_head
from deltazoo.ops.triton.prepare import LOG2_FLOOR, LOG2E, level_mask, three_terms, undo_decay


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
def two_terms(x, DTYPE: tl.constexpr):
    """Float32 x as two terms of DTYPE that sum to it but for 2^-17 of it (bfloat16), or as one and a zero (float32)."""
    if tl.bfloat16 == DTYPE:  # cut off, not rounded: one instruction
        hi = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        hi = x.to(DTYPE).to(tl.float32)
    return hi.to(DTYPE), (x - hi).to(DTYPE)


@triton.jit
def sums(x, mask, y, z):
    """`(x + y + z) @ mask`: sums of selected tokens on the matrix unit. Float32 is all in x; z may be missing."""
    if x.dtype == tl.float32:
        out = tl.dot(x, mask.to(x.dtype), input_precision="tf32x3")
    else:
        out = tl.dot(y, mask.to(x.dtype))
        if z is not None:
            out = tl.dot(z, mask.to(x.dtype), out)
        out = tl.dot(x, mask.to(x.dtype), out)
    return out


@triton.jit
def tail_tile(
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
    slot,
    first,
    rows,
    i_h,
    i_k,
    scale,
    shares_stride,
    value_tiles,
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
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All that the kernels below make of one tile of BK key channels of one chunk.

    All is transposed, `[key channels, tokens]`: products of 32 rows are synchronous on Hopper whatever the number of
    warps, and those of 64 rows have been miscompiled (docs/kernels.md).
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    EXACT: tl.constexpr = FAR or tl.float32 == DTYPE
    o_c, o_v, o_k = tl.arange(0, C), tl.arange(0, BV), i_k * BK + tl.arange(0, BK)
    m_c, m_k = o_c < rows, o_k < K
    m_ck = m_c[:, None] & m_k[None, :]
    v_base = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    p_W = W + slot * ((2 if HAS_BETA else 1) * C * C) + o_c[:, None] * C + o_c[None, :]
    g_last = tl.load(G + slot * K + o_k, mask=m_k, other=0.0)
    # Global loads stand well before their use, which waits for them.
    o_qk = (first * H + key_head(i_h, H, HV, GROUPED)) * K + o_c[:, None] * (H * K) + o_k[None, :]
    o_dk = (first * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
    b_g = tl.load(log_decay + o_dk, mask=m_ck, other=0.0)
    b_k = tl.trans(tl.load(k + o_qk, mask=m_ck, other=0.0))
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
        b_dO = tl.load(d_output + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_U = tl.load(U + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
        b_S = tl.load(states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dS = tl.load(d_states + slot * (K * V) + i_v * BV * K + o_vk, mask=m_vk, other=0.0)
        b_dq = tl.dot(tl.trans(b_S), tl.trans(b_dO), b_dq, input_precision=PRECISION)
        if HAS_BETA:
            b_Z = tl.load(Z + v_base + i_v * BV + o_cv, mask=m_cv, other=0.0)
            b_row = tl.dot(tl.trans(b_S), tl.trans(b_Z), b_row, input_precision=PRECISION)
        b_overlap += b_S.to(tl.float32) * b_dS.to(tl.float32)
        b_col = tl.dot(tl.trans(b_dS), tl.trans(b_U), b_col, input_precision=PRECISION)

    b_q = tl.trans(tl.load(q + o_qk, mask=m_ck, other=0.0))
    b_diagonal = tl.load(P_diagonal + slot * C + o_c)[None, :]
    if HAS_BETA:
        W_L = tl.load(p_W + C * C)
        b_beta = tl.load(beta + slot * C + o_c)[None, :]
    # W_P is strictly lower, so its zeros serve the mask, which gets the layout of something loaded this way.
    later = tl.where(o_c[:, None] >= o_c[None, :], 1.0, W_P).to(DTYPE)
    # Without `where` the compiler would split the operands of this sum once per warp.
    b_g = tl.maximum(b_g.to(tl.float32) * LOG2E, LOG2_FLOOR)
    b_g = tl.where(m_c[None, :], tl.trans(b_g), 0.0)
    if EXACT:
        g1, g2, g3 = three_terms(b_g, DTYPE)
        b_G = sums(g1, tl.trans(later), g2, g3)
    else:
        g1, g2 = two_terms(b_g, DTYPE)
        b_G = sums(g1, tl.trans(later), g2, None)
    entry = tl.exp2(b_G)
    if FAR:
        undone, direct = undo_decay(tl.trans(b_G), DTYPE)
        undone = tl.trans(undone)
    else:
        undone = tl.exp2(-b_G)
    k_written = b_k * undone
    if EXACT:
        b_col *= tl.exp2(sums(g1, o_c[:, None] > o_c[None, :], g2, g3))
        b_last = tl.sum(b_k * b_col, 1)
        b_pairs = tl.zeros([BK, C], dtype=tl.float32)
    else:  # the decay to the chunk's end is the whole one times `undone`, as good as 16 bits
        b_pairs = b_col * tl.exp2(g_last)[:, None]
        b_last = tl.sum(k_written * b_pairs, 1)
    k_written = k_written.to(DTYPE)

    if FAR:  # pairs whose later token is out of range take the levels below
        W_P = tl.where(direct[:, None], W_P, 0.0).to(DTYPE)
        if HAS_BETA:
            W_L = tl.where(direct[:, None], W_L, 0.0).to(DTYPE)
    b_dq = entry * tl.dot(k_written, tl.trans(W_P), b_dq * scale, input_precision=PRECISION)
    if HAS_BETA:
        # Row terms of dL and of the state's share both enter as `beta o row`; their products with k are d_beta.
        b_row = entry * tl.dot(k_written, tl.trans(W_L), -b_row, input_precision=PRECISION)
        b_pairs = tl.dot((b_beta * b_k * entry).to(DTYPE), W_L, b_pairs, input_precision=PRECISION)
    b_pairs = undone * tl.dot((b_q * entry).to(DTYPE), W_P, b_pairs, input_precision=PRECISION)
    b_col = b_col + b_pairs if EXACT else b_pairs

    if FAR:
        for level in tl.range(6, num_stages=1):
            middle = (o_c >> (level + 1) << (level + 1)) + (1 << level) - 1
            near, far = tl.minimum(o_c, middle)[None, :], tl.maximum(o_c, middle)[None, :]
            f = tl.exp2(sums(g1, (o_c[:, None] > near) & (o_c[:, None] <= far), g2, g3))
            pairs = level_mask(o_c, level) & (direct == 0)[:, None]
            k_f = b_k * f
            W_f = tl.where(pairs, tl.load(p_W), 0.0).to(DTYPE)
            b_dq += f * tl.dot(k_f.to(DTYPE), tl.trans(W_f), input_precision=PRECISION)
            b_col += f * tl.dot((b_q * f).to(DTYPE), W_f, input_precision=PRECISION)
            if HAS_BETA:
                W_f = tl.where(pairs, tl.load(p_W + C * C), 0.0).to(DTYPE)
                b_row += f * tl.dot(k_f.to(DTYPE), tl.trans(W_f), input_precision=PRECISION)
                b_col += f * tl.dot((b_beta * k_f).to(DTYPE), W_f, input_precision=PRECISION)

    b_dk, b_dG = b_col, b_q * b_dq - b_k * b_col
    if HAS_BETA:
        tl.store(
            d_beta + i_k * shares_stride.to(tl.int64) + first * HV + i_h + o_c * HV,
            tl.sum(b_k * b_row, 0),
            mask=m_c,
        )
        b_row *= b_beta
        b_dk += b_row
        b_dG += b_k * b_row
    b_dq += b_diagonal * b_k
    b_dk += b_diagonal * b_q
    tl.store(dq + o_dk, tl.trans(b_dq).to(dq.dtype.element_ty), mask=m_ck)
    tl.store(dk + o_dk, tl.trans(b_dk).to(dk.dtype.element_ty), mask=m_ck)
    if tl.float16 == DTYPE:  # gradients may leave its range
        b_dg = tl.cumsum(b_dG, 1, reverse=True)
    else:
        x, y = two_terms(b_dG, DTYPE)
        b_dg = sums(x, later, y, None)
    b_dg += b_last[:, None] + (tl.exp2(g_last) * tl.sum(b_overlap, 0))[:, None]
    if FAR:
        keeps = tl.load(log_decay + o_dk, mask=m_ck, other=0.0).to(tl.float32) > float("-inf")
        b_dg = tl.where(tl.trans(keeps), b_dg, 0.0)
    tl.store(d_log_decay + o_dk, tl.trans(b_dg), mask=m_ck)


@triton.jit(do_not_specialize=["shares_stride", "value_tiles", "T", "NT", "H", "HV"])
def tail_channel_kernel(
    q,
    k,
    beta,
    log_decay,
    G,
    far,
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
    """dq, dk, d_log_decay and a share of d_beta of one chunk that is not far, for one tile of BK key channels.

    dq and dk are per value head; each tile stores its share of d_beta, `[K / BK, B, T, HV]`. Grid (K / BK * HV, NT, B).
    """
    tiles = (K + BK - 1) // BK
    i_h, i_t, i_b = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    if rows > 0 and tl.load(far + slot) == 0:
        i_k = tl.program_id(0) % tiles
        tail_tile(
            q, k, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk, d_beta, d_log_decay,
            slot, first, rows, i_h, i_k, scale, shares_stride, value_tiles, H, HV, K, V, BK, BV, C, False, HAS_BETA,
            GROUPED, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["shares_stride", "value_tiles", "key_tiles", "chunks", "slots", "T", "NT", "H", "HV"])
def tail_far_kernel(
    q,
    k,
    beta,
    log_decay,
    G,
    far,
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
    key_tiles,
    chunks,
    slots,
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
    """Likewise all tiles of the far ones among up to 16 neighbouring `chunks`, of `slots` in all. Grid (programs,)."""
    start, o = tl.program_id(0).to(tl.int64) * chunks, tl.arange(0, 16)
    count = tl.minimum(slots - start, chunks).to(tl.int32)
    if tl.max(tl.load(far + start + o, mask=o < count, other=0), 0) == 0:
        return
    for i in tl.range(0, count, num_stages=1):
        slot = start + i
        if tl.load(far + slot) != 0:
            i_h, i_t, i_b = (slot % HV).to(tl.int32), (slot // HV % NT).to(tl.int32), slot // HV // NT
            first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
            for i_k in tl.range(0, key_tiles, num_stages=1):
                tail_tile(
                    q, k, beta, log_decay, G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk, d_beta,
                    d_log_decay, slot, first, rows, i_h, i_k, scale, shares_stride, value_tiles, H, HV, K, V, BK, BV,
                    C, True, HAS_BETA, GROUPED, PRECISION, STAGES,
                )  # fmt: skip
