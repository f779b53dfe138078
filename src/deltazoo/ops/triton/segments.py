"""Joining the segments of long rows: from each segment's transition to the state that it starts or ends with."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments", "HV"])
def chain_kernel(
    transitions,
    added,
    first,
    states,
    segments,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """`states[0] = first` (None: zero), `states[i + 1] = transitions[i] states[i] + added[i]` over a row's segments.

    REVERSE runs from the last segment to the first with the transposed transitions. All `[N * segments, HV, K, V]`
    float32, transitions `[.., K, K]`, first `[N, HV, K, V]`. One program owns BV value channels of one head of one row;
    its states pass through memory, BK key channels at a time. Grid (V / BV * HV * N).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    base = i_n.to(tl.int64) * segments * HV + i_h
    slot = base + (segments - 1) * HV if REVERSE else base
    for row in tl.static_range(0, K, BK):
        o_state, m_state = (row + o_k)[:, None] * V + o_v[None, :], (row + o_k < K)[:, None] & m_v
        state = tl.zeros([BK, BV], dtype=tl.float32)
        if first is not None:
            state = tl.load(first + (i_n.to(tl.int64) * HV + i_h) * (K * V) + o_state, mask=m_state, other=0.0)
        tl.store(states + slot * (K * V) + o_state, state, mask=m_state)
    for _ in range(segments - 1):
        tl.debug_barrier()  # the state was written by other threads of this program
        following = slot - HV if REVERSE else slot + HV
        for row in tl.static_range(0, K, BK):
            o_row = row + o_k
            o_state, m_state = o_row[:, None] * V + o_v[None, :], (o_row < K)[:, None] & m_v
            state = tl.load(added + slot * (K * V) + o_state, mask=m_state, other=0.0)
            for column in tl.static_range(0, K, BK):
                o_col = column + o_k
                o_M = o_col[None, :] * K + o_row[:, None] if REVERSE else o_row[:, None] * K + o_col[None, :]
                M = tl.load(
                    transitions + slot * (K * K) + o_M, mask=(o_row < K)[:, None] & (o_col < K)[None, :], other=0.0
                )
                p_before = states + slot * (K * V) + o_col[:, None] * V + o_v[None, :]
                before = tl.load(p_before, mask=(o_col < K)[:, None] & m_v, other=0.0)
                state = tl.dot(M, before, state, input_precision="tf32x3")
            tl.store(states + following * (K * V) + o_state, state, mask=m_state)
        slot = following
