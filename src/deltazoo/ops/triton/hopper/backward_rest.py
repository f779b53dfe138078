"""What the fused backward leaves to small kernels, in plain Triton: tiny step sizes, and the end of d_log_decay."""

import triton
import triton.language as tl

__all__ = ["log_decay_gradient_kernel", "small_step", "small_steps_kernel"]


@triton.constexpr_function
def small_step(DTYPE):
    """The largest step size whose gradient is not `<z, u> / beta` (see `chunk.score_gradients.store_step_gradient`).

    Of bfloat16 even a product with a tiny step size has all digits, and the other form is slower.
    """
    return 2.0**-20 if tl.bfloat16 == DTYPE else 2.0**-4


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "value_tiles", "slots"])
def small_steps_kernel(
    k,
    v,
    beta,
    G,
    AP,
    states,
    left,
    dv,
    d_beta,
    T,
    NT,
    H,
    HV,
    value_tiles,
    slots,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    DECAY: tl.constexpr,
):
    """d_beta and dv of the tokens with a small step size, whose rows of dv are Z; grid (slots / CHUNKS).

    `d_beta = <z, v - y>`, y what the token reads of its key: of the state that enters the chunk, and of the corrections
    of the tokens before, which are computed again. Chunks without such a token take no time. A branch in the fused
    kernel would cost every chunk registers and addresses.
    """
    DTYPE: tl.constexpr = k.dtype.element_ty
    SMALL: tl.constexpr = small_step(DTYPE)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    begin = tl.program_id(0) * CHUNKS
    o_all = tl.arange(0, CHUNKS * C)
    b_all = tl.load(beta + begin.to(tl.int64) * C + o_all, mask=begin * C + o_all < slots * C, other=1.0)
    if tl.min(b_all, 0) > SMALL:
        return
    for i in tl.range(0, CHUNKS, num_stages=1):
        slot = tl.minimum(begin + i, slots - 1)  # the last program may look at the last chunk several times
        i_b, i_t, i_h = slot // (NT * HV), slot // HV % NT, slot % HV
        b_beta = tl.load(beta + slot.to(tl.int64) * C + o_c)
        m_c = i_t * C + o_c < T
        small = m_c & (b_beta <= SMALL) & (begin + i < slots)
        if left is not None:
            small = small & (tl.load(left + i_b * HV + i_h) == 0)
        if tl.max(small.to(tl.int32), 0) != 0:
            first = i_b.to(tl.int64) * T + i_t * C
            o_values = (first * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
            o_keys = (first * H + i_h // (HV // H)) * K + o_c[:, None] * (H * K) + o_k[None, :]
            b_k = tl.load(k + o_keys, mask=m_c[:, None], other=0.0)
            N = tl.dot(b_k, tl.trans(b_k))
            if DECAY == 1:
                b_G = tl.load(G + slot.to(tl.int64) * C + o_c)
                entry = tl.exp2(b_G)[:, None]
                N *= tl.exp2(tl.minimum(b_G[:, None] - b_G[None, :], 0.0))
            N = tl.where(o_c[:, None] > o_c[None, :], N, 0.0).to(DTYPE)
            A = tl.trans(tl.load(AP + slot.to(tl.int64) * (2 * C * C) + o_c[:, None] * C + o_c[None, :]))
            b_dbeta = tl.zeros([C], dtype=tl.float32)
            for i_v in tl.range(0, value_tiles, num_stages=1):
                p_S = states + slot.to(tl.int64) * (K * V) + (i_v * BV + o_v)[:, None] * K + o_k[None, :]
                Y = tl.dot(b_k, tl.trans(tl.load(p_S)))
                if DECAY == 1:
                    Y *= entry
                b_v = tl.load(v + o_values + i_v * BV, mask=m_c[:, None], other=0.0).to(tl.float32)
                U = tl.dot(A, (b_beta[:, None] * (b_v - Y)).to(DTYPE))
                Y = tl.dot(N, U.to(DTYPE), Y)
                b_Z = tl.load(dv + o_values + i_v * BV, mask=m_c[:, None], other=0.0).to(tl.float32)
                b_dbeta += tl.sum(b_Z * (b_v - Y), 1)
                tl.store(dv + o_values + i_v * BV, (b_beta[:, None] * b_Z).to(DTYPE), mask=small[:, None])
            tl.store(d_beta + (first + o_c) * HV + i_h, b_dbeta, mask=small)


@triton.jit(do_not_specialize=["T", "HV"])
def log_decay_gradient_kernel(d_G, overlap, left, log_decay, d_log_decay, T, HV, C: tl.constexpr, D: tl.constexpr):
    """d_log_decay of one chunk of one head: `<S, dS>` less the running sum of dG before the token; grid (HV, NC, B)."""
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if left is not None:
        if tl.load(left + i_b * HV + i_h) != 0:
            return
    slot = (i_b.to(tl.int64) * tl.cdiv(T, C) + i_t) * HV + i_h
    o_t = i_t * C + tl.arange(0, C)
    o_c, m_c = (i_b.to(tl.int64) * T + o_t) * HV + i_h, o_t < T
    b_dG = tl.load(d_G + o_c, mask=m_c, other=0.0)
    first = tl.sum(tl.load(overlap + slot * D + tl.arange(0, D)), 0)
    keeps = tl.load(log_decay + o_c, mask=m_c, other=0.0).to(tl.float32) > float("-inf")
    b_dg = first - (tl.cumsum(b_dG, 0) - b_dG)
    tl.store(d_log_decay + o_c, tl.where(keeps, b_dg, 0.0), mask=m_c)
