"""The serial part: the state walks from chunk to chunk, forward with the outputs or the kept states leaving on the way.

Everything is transposed, value channels down: the state `[V, K]`, the corrections `U^T [V, C]` and the output
`O^T [V, C]` are then always the left operand of a product, which the matrix unit reads from registers. So nothing that
the chain of chunks depends on passes through shared memory, and a warp never waits for another one.
"""

import triton
import triton.language as tl

from deltazoo.ops.triton.layout import sequence_bounds


@triton.jit
def times_terms(x, a, a_mid, a_lo, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """`x @ (a + a_mid + a_lo)` for float32 x: x as one term, or as two in strict mode (TERMS = 3)."""
    hi = x.to(a.dtype)
    out = tl.dot(hi, a, input_precision=PRECISION)
    if TERMS > 1:
        out = tl.dot(hi, a_mid, out)
        out = tl.dot(hi, a_lo, out)
        out = tl.dot((x - hi.to(tl.float32)).to(a.dtype), a, out)
    return out


@triton.jit
def add_product(S, u, k, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """`S + u @ k` for float32 u: as one term, or as two in strict mode."""
    hi = u.to(k.dtype)
    S = tl.dot(hi, k, S, input_precision=PRECISION)
    if TERMS > 1:
        S = tl.dot((u - hi.to(tl.float32)).to(k.dtype), k, S)
    return S


@triton.jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def scan_kernel(
    q_in,
    k_in,
    k_out,
    v,
    beta,
    G,
    AP,
    output,
    U_out,
    states,
    initial_state,
    final_state,
    cu_seqlens,
    chunk_offsets,
    scale,
    T,
    NT,
    segments,
    chunks,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr,
    TERMS: tl.constexpr,
    INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_V: tl.constexpr,
    OUTPUT: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One value head of one sequence or segment, BV value channels: the final state; with OUTPUT the output; with KEEP
    the states entering each chunk and the corrections U, which the backward pass needs. It starts from zero, a given
    state (INITIAL = 1) or the identity (2). Without HAS_V the values are zero. HK heads of q and k. Grid (V / BV * HV *
    N)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    first, length, chunk = sequence_bounds(cu_seqlens, chunk_offsets, i_n, T, NT, segments, chunks, C, PACKED)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, i_v * BV + o_v < V
    # Scalar bases advance by chunk; the offsets of a tile fit 32 bits and never change.
    slot = chunk * HV + i_h
    qk_base = (first * HK + i_h // (HV // HK)) * K
    v_base = (first * HV + i_h) * V + i_v * BV
    AP += slot * ((TERMS + 1) * C * C)
    o_qk = o_c[:, None] * (HK * K) + o_k[None, :]
    o_vc = o_v[:, None] + o_c[None, :] * (HV * V)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_kept = i_v * BV * K + o_v[:, None] * K + o_k[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_h) * (K * V) + i_v * BV + o_v[:, None] + o_k[None, :] * V
    m_state = m_v[:, None] & m_k[None, :]
    if INITIAL == 1:
        S = tl.load(initial_state + o_state, mask=m_state, other=0.0)
    elif INITIAL == 2:
        S = tl.where((i_v * BV + o_v)[:, None] == o_k[None, :], 1.0, 0.0)
    else:
        S = tl.zeros([BV, BK], dtype=tl.float32)

    for i_t in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        i_slot = slot + tl.cast(i_t, tl.int64) * HV
        step = tl.cast(i_t, tl.int64) * C
        p_AP = AP + step * (HV * C * (TERMS + 1))
        m_c = o_c < length - i_t * C
        m_qk, m_vc = m_c[:, None] & m_k[None, :], m_v[:, None] & m_c[None, :]
        b_k_out = tl.load(k_out + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
        if HAS_V:
            b_v = tl.load(v + v_base + step * (HV * V) + o_vc, mask=m_vc, other=0.0).to(tl.float32)
        else:
            b_v = tl.zeros([BV, C], dtype=tl.float32)
        S_hi = S.to(b_k_out.dtype)
        if DECAY == 1:
            b_G = tl.load(G + i_slot * C + o_c)
            g_last = tl.load(G + i_slot * C + C - 1)
        if DECAY == 2:
            g_last = tl.load(G + i_slot * K + o_k, mask=m_k, other=0.0)[None, :]
        if KEEP:
            tl.store(states + i_slot * (K * V) + o_kept, S_hi, mask=m_state)
        if HAS_BETA:
            if DECAY == 2:
                b_k_in = tl.load(k_in + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
            else:
                b_k_in = b_k_out
            b_beta = tl.load(beta + i_slot * C + o_c)
            A = tl.load(p_AP + o_cc)
            if TERMS > 1:
                A_mid = tl.load(p_AP + C * C + o_cc)
                A_lo = tl.load(p_AP + 2 * C * C + o_cc)
            else:
                A_mid, A_lo = A, A
            Y = tl.dot(S_hi, tl.trans(b_k_in), input_precision=PRECISION)
            if DECAY == 1:
                Y *= tl.exp2(b_G)[None, :]
            U = times_terms(b_beta[None, :] * (b_v - Y), A, A_mid, A_lo, TERMS, PRECISION)
        else:
            U = b_v
        if KEEP:
            tl.store(U_out + v_base + step * (HV * V) + o_vc, U.to(U_out.dtype.element_ty), mask=m_vc)
        if OUTPUT:
            b_q = tl.load(q_in + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
            P = tl.load(p_AP + TERMS * C * C + o_cc)
            O = tl.dot(S_hi, tl.trans(b_q), input_precision=PRECISION)
            if DECAY == 1:
                O *= (scale * tl.exp2(b_G))[None, :]
            else:
                O *= scale
            O = tl.dot(U.to(P.dtype), P, O, input_precision=PRECISION)
            tl.store(output + v_base + step * (HV * V) + o_vc, O.to(output.dtype.element_ty), mask=m_vc)
        if DECAY == 1:
            U *= tl.exp2(g_last - b_G)[None, :]
        if DECAY != 0:
            S *= tl.exp2(g_last)
        S = add_product(S, U, b_k_out, TERMS, PRECISION)
    if final_state is not None:
        tl.store(final_state + o_state, S, mask=m_state)


@triton.jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def reverse_scan_kernel(
    q_in,
    k_in,
    k_out,
    beta,
    G,
    AP,
    d_output,
    Z_out,
    d_states,
    d_final,
    d_initial,
    cu_seqlens,
    chunk_offsets,
    scale,
    T,
    NT,
    segments,
    chunks,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same walk backwards, for gradients: with dS the gradient of the state that leaves a chunk,

        dU = P^T dO + k_out dS,   Z = A^T dU,   dS' = total o dS + scale q_in^T dO - k_in^T (beta o Z)

    with KEEP storing dS and Z (without beta: Z = dU) of every chunk. Grid (V / BV * HV * N)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    first, length, chunk = sequence_bounds(cu_seqlens, chunk_offsets, i_n, T, NT, segments, chunks, C, PACKED)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, i_v * BV + o_v < V
    slot = chunk * HV + i_h
    qk_base = (first * HK + i_h // (HV // HK)) * K
    v_base = (first * HV + i_h) * V + i_v * BV
    AP += slot * ((TERMS + 1) * C * C)
    o_qk = o_c[:, None] * (HK * K) + o_k[None, :]
    o_vc = o_v[:, None] + o_c[None, :] * (HV * V)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_kept = i_v * BV * K + o_v[:, None] * K + o_k[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_h) * (K * V) + i_v * BV + o_v[:, None] + o_k[None, :] * V
    m_state = m_v[:, None] & m_k[None, :]
    if HAS_FINAL:
        dS = tl.load(d_final + o_state, mask=m_state, other=0.0)
    else:
        dS = tl.zeros([BV, BK], dtype=tl.float32)

    NC = tl.cdiv(length, C)
    for i in tl.range(0, NC, num_stages=STAGES):
        i_t = NC - 1 - i
        i_slot = slot + tl.cast(i_t, tl.int64) * HV
        step = tl.cast(i_t, tl.int64) * C
        p_AP = AP + step * (HV * C * (TERMS + 1))
        m_c = o_c < length - i_t * C
        m_qk, m_vc = m_c[:, None] & m_k[None, :], m_v[:, None] & m_c[None, :]
        b_k_out = tl.load(k_out + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
        b_dO = tl.load(d_output + v_base + step * (HV * V) + o_vc, mask=m_vc, other=0.0)
        b_q = tl.load(q_in + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
        P = tl.load(p_AP + TERMS * C * C + o_cc)
        if DECAY == 1:
            b_G = tl.load(G + i_slot * C + o_c)
            g_last = tl.load(G + i_slot * C + C - 1)
        if DECAY == 2:
            g_last = tl.load(G + i_slot * K + o_k, mask=m_k, other=0.0)[None, :]
        dS_hi = dS.to(b_k_out.dtype)
        if KEEP:
            tl.store(d_states + i_slot * (K * V) + o_kept, dS_hi, mask=m_state)
        dU = tl.dot(dS_hi, tl.trans(b_k_out), input_precision=PRECISION)
        if DECAY == 1:
            dU *= tl.exp2(g_last - b_G)[None, :]
        dU = tl.dot(b_dO, tl.trans(P), dU, input_precision=PRECISION)
        if DECAY != 0:
            dS *= tl.exp2(g_last)
        if DECAY == 1:
            dO = (b_dO.to(tl.float32) * (scale * tl.exp2(b_G))[None, :]).to(b_dO.dtype)
        else:
            dO = (b_dO.to(tl.float32) * scale).to(b_dO.dtype)
        dS = tl.dot(dO, b_q, dS, input_precision=PRECISION)
        if HAS_BETA:
            if DECAY == 2:
                b_k_in = tl.load(k_in + qk_base + step * (HK * K) + o_qk, mask=m_qk, other=0.0)
            else:
                b_k_in = b_k_out
            b_beta = tl.load(beta + i_slot * C + o_c)
            A = tl.trans(tl.load(p_AP + o_cc))
            if TERMS > 1:
                A_mid = tl.trans(tl.load(p_AP + C * C + o_cc))
                A_lo = tl.trans(tl.load(p_AP + 2 * C * C + o_cc))
            else:
                A_mid, A_lo = A, A
            Z = times_terms(dU, A, A_mid, A_lo, TERMS, PRECISION)
            if DECAY == 1:
                dX = Z * (-b_beta * tl.exp2(b_G))[None, :]
            else:
                dX = Z * (-b_beta)[None, :]
            dS = add_product(dS, dX, b_k_in, TERMS, PRECISION)
        else:
            Z = dU
        if KEEP:
            tl.store(Z_out + v_base + step * (HV * V) + o_vc, Z.to(Z_out.dtype.element_ty), mask=m_vc)
    if HAS_INITIAL:
        tl.store(d_initial + o_state, dS, mask=m_state)
