"""The first state of each segment of a long row, from the transitions of the segments before."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments", "HV"])
def chain_kernel(
    transitions, added, first, states, segments, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store `states[0] = first` (None: zero) and `states[i + 1] = transitions[i] states[i] + added[i]` of a row.

    REVERSE runs from the last segment to the first with the transposed transitions. All `[N * segments, HV, K, V]`
    float32, transitions `[.., K, K]`, first `[N, HV, K, V]`. One program owns BV value channels of one head of one row,
    as tiles of BK key channels. Grid (V / BV * HV * N).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    THROUGH_MEMORY: tl.constexpr = NK > 2  # the state is too large for the registers
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    o_state = o_k[:, None] * V + o_v[None, :]
    o_M = o_k[None, :] * K + o_k[:, None] if REVERSE else o_k[:, None] * K + o_k[None, :]
    slot = i_n.to(tl.int64) * segments * HV + i_h
    if REVERSE:
        slot += (segments - 1) * HV
    S = ()
    for row in tl.static_range(NK):
        m_state = (row * BK + o_k < K)[:, None] & m_v
        tile = tl.zeros([BK, BV], dtype=tl.float32)
        if first is not None:
            p_first = first + ((i_n.to(tl.int64) * HV + i_h) * K + row * BK) * V
            tile = tl.load(p_first + o_state, mask=m_state, other=0.0)
        tl.store(states + (slot * K + row * BK) * V + o_state, tile, mask=m_state)
        if not THROUGH_MEMORY:
            S += (tile,)
    for i in tl.range(0, segments - 1, num_stages=STAGES):
        step = tl.cast(i, tl.int64) * HV
        before = slot - step if REVERSE else slot + step
        after = before - HV if REVERSE else before + HV
        last, S = S, ()
        if THROUGH_MEMORY:
            tl.debug_barrier()  # other threads of this program wrote the state
        for row in tl.static_range(NK):
            m_row = row * BK + o_k < K
            m_state = m_row[:, None] & m_v
            tile = tl.load(added + (before * K + row * BK) * V + o_state, mask=m_state, other=0.0)
            for column in tl.static_range(NK):
                corner = (column * K + row) * BK if REVERSE else (row * K + column) * BK
                m_M = m_row[:, None] & (column * BK + o_k < K)[None, :]
                M = tl.load(transitions + before * (K * K) + corner + o_M, mask=m_M, other=0.0)
                if THROUGH_MEMORY:
                    m_last = (column * BK + o_k < K)[:, None] & m_v
                    source = tl.load(states + (before * K + column * BK) * V + o_state, mask=m_last, other=0.0)
                else:
                    source = last[column]
                tile = tl.dot(M, source, tile, input_precision="tf32x3")
            tl.store(states + (after * K + row * BK) * V + o_state, tile, mask=m_state)
            if not THROUGH_MEMORY:
                S += (tile,)
