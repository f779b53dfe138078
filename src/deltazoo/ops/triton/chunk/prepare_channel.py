"""The chunk-parallel preparation for one decay per key channel.

The decay is inside the products over channels. Rows for which `exp(-G)` is in range, G the decay since the chunk's
start, take one product, `(q o exp(G)) (k o exp(-G))^T`. The rows after them, if any, take six levels of blocks, each
twice as long as the one before, which cover every pair of tokens once. With moderate gates few chunks have such rows,
so a program first assumes that its chunk has none, and starts again if it finds one. If the channels take several
tiles, registers do not suffice for both forms, and a second launch prepares these chunks. The flag `strong_decay` of a
chunk tells this launch and the gradient kernels: 0, it has no such rows; 1, it has some; 2, the decay is also beyond
the range of the gradients' product.

The rows of a chunk, one per micro-step, are loaded in another order: first the first row of each of RUNS runs of
neighbouring rows, then the second ones, and so on. A run is then in the registers of one thread, and its running sum of
log-decays takes plain additions. Only the first micro-step of a token has a log-decay, and only the last one a query.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head, tokens_of
from deltazoo.ops.triton.chunk.decay_factors import (
    centred_range,
    decays_beyond,
    exponent_range,
    level_factor,
    level_mask,
    log2_decay,
    masked_sum,
)
from deltazoo.ops.triton.chunk.inverse import store_inverse
from deltazoo.ops.triton.chunk.prepare import store_scores
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK


@triton.jit
def running_sum(g, RUNS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Running sum over the tokens of `g [C, BK]`, in the order of loading, and the sum over all.

    No sum reads a later token, so no bit of it depends on one. The sum over all is `[RUNS, BK]`, once per run: `[BK]`
    would take a reduction, whose traffic through shared memory has bank conflicts.
    """
    run = tl.arange(0, RUNS)[:, None]
    g = tl.reshape(g, [C // RUNS, RUNS, BK])
    totals = tl.sum(g, 0)
    ends = tl.cumsum(totals, 0)
    starts = tl.gather(ends, tl.broadcast_to(tl.maximum(run - 1, 0), [RUNS, BK]), 0)
    starts = tl.where(run == 0, 0.0, starts)
    total = tl.gather(ends, tl.full([RUNS, BK], RUNS - 1, tl.int32), 0)
    return tl.reshape(tl.cumsum(g, 0) + starts[None, :, :], [C, BK]), total


@triton.jit
def of_all_runs(x, C: tl.constexpr):
    """`x [RUNS, BK]` repeated for the rows of all runs, `[C, BK]`, in the order of loading."""
    RUN: tl.constexpr = C // x.shape[0]
    return tl.reshape(tl.broadcast_to(x[None, :, :], [RUN, x.shape[0], x.shape[1]]), [C, x.shape[1]])


@triton.jit
def by_token(x, RUNS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The rows of `x [C, BK]`, changed from the order of loading to that of the tokens."""
    return tl.reshape(tl.permute(tl.reshape(x, [C // RUNS, RUNS, BK]), (1, 0, 2)), [C, BK])


@triton.jit
def add_levels(
    b_P, b_N, q, k, erase_key, log_decay, k_out, first, rows, heads, o_c, o_k, direct, K: tl.constexpr,
    HAS_BETA: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Add the pairs of the rows that are not `direct`, over some channels, and store these channels of `k_out`."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    RANGE: tl.constexpr = exponent_range(DTYPE)
    i_h, H, HV = heads
    g_base, g_stride = (first * HV + i_h) * K, HV * K
    q_base = (first * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else g_base
    q_stride = H * K if GROUPED else g_stride
    query_base, gate_base = q_base, g_base
    m_ck = (o_c < rows)[:, None] & (o_k < K)[None, :]
    o_qk, o_gk = o_c[:, None] * q_stride + o_k[None, :], o_c[:, None] * g_stride + o_k[None, :]
    o_query, m_query, o_gate, m_gate = o_qk, m_ck, o_gk, m_ck
    if MICRO_STEPS > 1:
        first_token, o_token, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        gate_base = (first_token * HV + i_h) * K
        query_base = (first_token * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else gate_base
        o_query, m_query = o_token[:, None] * q_stride + o_k[None, :], m_ck & ends[:, None]
        o_gate, m_gate = o_token[:, None] * g_stride + o_k[None, :], m_ck & begins[:, None]
    row, other = o_c[:, None], o_c[None, :]
    b_k = tl.load(k + q_base + o_qk, mask=m_ck, other=0.0)
    b_q = tl.load(q + query_base + o_query, mask=m_query & (direct == 0), other=0.0)
    b_e = b_k
    if erase_key is not None:
        b_e = tl.load(erase_key + q_base + o_qk, mask=m_ck & (direct == 0), other=0.0)
    elif HAS_BETA:
        b_e = tl.where(direct, 0.0, b_k).to(DTYPE)
    b_g = log2_decay(log_decay + gate_base + o_gate, m_gate)
    b_k_out = b_k * tl.exp2(masked_sum((other > row).to(DTYPE), b_g))
    tl.store(k_out + g_base + o_gk, b_k_out.to(DTYPE), mask=m_ck)
    b_qk = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
    b_P += tl.where(row == other, b_qk[:, None], 0.0)
    if HAS_BETA:  # for the erase gain
        b_N += tl.where(row == other, tl.sum(b_e.to(tl.float32) * b_k.to(tl.float32), 1)[:, None], 0.0)

    # Within blocks of 16 rows: rows in range from the block's start take one product.
    same = (row >> 4) == (other >> 4)
    b_G = masked_sum((same & (other <= row)).to(DTYPE), b_g)
    near = tl.min(b_G, 1)[:, None] >= -RANGE
    decay, undone = tl.exp2(b_G), tl.exp2(tl.minimum(-b_G, RANGE))
    decay = tl.where(near, decay, 0.0)
    k_written = tl.trans((b_k * undone).to(DTYPE))
    pairs = same & (other < row)
    b_P += tl.where(pairs, tl.dot((b_q * decay).to(DTYPE), k_written, input_precision=PRECISION), 0.0)
    if HAS_BETA:
        b_N += tl.where(pairs, tl.dot((b_e * decay).to(DTYPE), k_written, input_precision=PRECISION), 0.0)
    # All others take the levels; those below 4 are of pairs within such a block.
    all_near = tl.min((near | (direct != 0)).to(tl.int32))
    for level in tl.range(4 * all_near, 6, num_stages=1):
        f = level_factor(b_g, o_c, level, DTYPE)
        pairs = level_mask(o_c, level)
        k_f = tl.trans((b_k * f).to(DTYPE))
        f = tl.where(near & (level < 4), 0.0, f)
        b_P += tl.where(pairs, tl.dot((b_q * f).to(DTYPE), k_f, input_precision=PRECISION), 0.0)
        if HAS_BETA:
            b_N += tl.where(pairs, tl.dot((b_e * f).to(DTYPE), k_f, input_precision=PRECISION), 0.0)
    return b_P, b_N


@triton.jit
def read_tile(
    inputs, o_k, first, rows, heads, K: tl.constexpr, BK: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr,
    GROUPED: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Channels o_k of a chunk, rows in the order of loading: queries, keys, erase keys and log-decays, running sums of
    these, and sums over all rows; offsets and masks of the rows of k, and of those of q.
    """
    q, k, erase_key, log_decay = inputs
    i_h, H, HV = heads
    o_c = tl.arange(0, C)
    RUN: tl.constexpr = C // RUNS
    row = (o_c % RUNS * RUN + o_c // RUNS)[:, None]
    g_base, g_stride = (first * HV + i_h) * K, HV * K
    q_base = (first * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else g_base
    q_stride = H * K if GROUPED else g_stride
    query_base, gate_base = q_base, g_base
    if MICRO_STEPS > 1:
        first_token, token, begins, ends = tokens_of(first, row, MICRO_STEPS)
        gate_base = (first_token * HV + i_h) * K
        query_base = (first_token * H + key_head(i_h, H, HV, GROUPED)) * K if GROUPED else gate_base
    mask = row < rows
    if K % BK != 0:
        mask = mask & (o_k < K)[None, :]
    o_gk = row * g_stride + o_k[None, :]
    o_qk = row * q_stride + o_k[None, :] if GROUPED else o_gk
    o_query, o_gate, m_query, m_gate = o_qk, o_gk, mask, mask
    if MICRO_STEPS > 1:
        o_gate = token * g_stride + o_k[None, :]
        o_query = token * q_stride + o_k[None, :] if GROUPED else o_gate
        m_query, m_gate = mask & ends, mask & begins
    b_g = log2_decay(log_decay + gate_base + o_gate, m_gate)
    b_k = tl.load(k + q_base + o_qk, mask=mask, other=0.0)
    b_q = tl.load(q + query_base + o_query, mask=m_query, other=0.0)
    b_e = b_k
    if erase_key is not None:
        b_e = tl.load(erase_key + q_base + o_qk, mask=mask, other=0.0)
    b_G, g_last = running_sum(b_g, RUNS, C, BK)
    return (b_q, b_k, b_e, b_g, b_G, g_last), (g_base, o_gk, mask), (gate_base, o_gate, m_query)


@triton.jit
def scores_of_tile(
    tile, by_key, by_query, outputs, o_k, slot, K: tl.constexpr, BK: tl.constexpr, RUNS: tl.constexpr,
    C: tl.constexpr, STRONG: tl.constexpr, HAS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store G, q and k of some channels, with the decay multiplied in; return their part of P and N, by token.

    With STRONG these hold for rows in range, and `k_out` holds if all rows are.
    """
    b_q, b_k, b_e, b_g, b_G, g_last = tile
    G, q_in, k_in, k_out = outputs
    g_base, o_gk, mask = by_key
    gate_base, o_gate, m_query = by_query
    DTYPE: tl.constexpr = q_in.dtype.element_ty
    o_c = tl.arange(0, C)
    run = tl.arange(0, RUNS)[:, None]
    tl.store(G + slot * K + o_k[None, :] + run * 0, g_last, mask=(run == 0) & (o_k < K)[None, :])
    decay = tl.exp2(b_G)
    undone = tl.exp2(tl.minimum(-b_G, exponent_range(DTYPE)) if STRONG else -b_G)
    q_read, k_read = (b_q * decay).to(DTYPE), (b_e * decay).to(DTYPE)
    k_written = b_k * undone
    tl.store(q_in + gate_base + o_gate, q_read, mask=m_query)
    tl.store(k_in + g_base + o_gk, k_read, mask=mask)
    if tl.float32 == DTYPE:
        row = (o_c % RUNS * (C // RUNS) + o_c // RUNS)[:, None]
        b_k_out = b_k * tl.exp2(masked_sum((tl.trans(row) > row).to(DTYPE), b_g))
    else:  # as accurate as 16 bits
        b_k_out = (k_written * of_all_runs(tl.exp2(g_last), C)).to(DTYPE)
    tl.store(k_out + g_base + o_gk, b_k_out, mask=mask)
    k_written = tl.trans(by_token(k_written.to(DTYPE), RUNS, C, BK))
    P = tl.dot(by_token(q_read, RUNS, C, BK), k_written, input_precision=PRECISION)
    N = tl.zeros([C, C], dtype=tl.float32)
    if HAS_BETA:
        N = tl.dot(by_token(k_read, RUNS, C, BK), k_written, input_precision=PRECISION)
    if tl.float32 == DTYPE:
        b_qk = by_token(tl.sum(b_q * b_k, 1)[:, None], RUNS, C, 1)
        P = tl.where(o_c[:, None] == o_c[None, :], b_qk, P)
    return P, N


@triton.jit
def prepare_chunk(
    q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, q_in, k_in, k_out, slot, first, rows,
    i_h, scale, tiles, H, HV, K: tl.constexpr, BK: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr,
    STRONG: tl.constexpr, HAS_BETA: tl.constexpr, STRICT: tl.constexpr, BY_GAIN: tl.constexpr, GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk, BK channels at a time; returns its flag `strong_decay`.

    Without STRONG it returns early if that is not 0. With STRONG there are `tiles`, and those with rows out of range
    take levels.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    RANGE: tl.constexpr = exponent_range(DTYPE)
    o_c = tl.arange(0, C)
    diagonal, below = o_c[:, None] == o_c[None, :], o_c[:, None] > o_c[None, :]
    heads = (i_h, H, HV)
    inputs, outputs = (q, k, erase_key, log_decay), (G, q_in, k_in, k_out)
    if HAS_BETA:
        m_c = o_c < rows
        b_beta = tl.load(beta + first * HV + i_h + o_c * HV, mask=m_c, other=0.0).to(tl.float32)
    b_P = tl.zeros([C, C], dtype=tl.float32)
    b_N = tl.zeros([C, C], dtype=tl.float32)
    flag = tl.full([], 0, tl.int32)
    if STRONG:
        TILES: tl.constexpr = (K + BK - 1) // BK
        for i in tl.range(
            0, tiles if TILES > 2 else TILES, num_stages=1, loop_unroll_factor=1 if TILES > 2 else TILES
        ):  # one or two tiles are no loop, which spills
            o_k = i * BK + tl.arange(0, BK)
            tile, by_key, by_query = read_tile(inputs, o_k, first, rows, heads, K, BK, RUNS, C, GROUPED, MICRO_STEPS)
            b_G, g_last = tile[4], tile[5]
            flag = tl.maximum(flag, 1 + decays_beyond(g_last, centred_range(DTYPE)).to(tl.int32))
            P, N = scores_of_tile(
                tile, by_key, by_query, outputs, o_k, slot, K, BK, RUNS, C, STRONG, HAS_BETA, PRECISION
            )
            direct = by_token(tl.min(b_G, 1)[:, None], RUNS, C, 1) >= -RANGE
            b_P += tl.where(direct, P, 0.0)
            b_N += tl.where(direct, N, 0.0)
            if decays_beyond(g_last, RANGE):
                tl.debug_barrier()  # `k_out` has been stored by other threads
                b_P, b_N = add_levels(
                    b_P, b_N, q, k, erase_key, log_decay, k_out, first, rows, heads, o_c, o_k, direct, K, HAS_BETA,
                    GROUPED, PRECISION, MICRO_STEPS,
                )  # fmt: skip
    else:
        for i in tl.static_range((K + BK - 1) // BK):
            o_k = i * BK + tl.arange(0, BK)
            tile, by_key, by_query = read_tile(inputs, o_k, first, rows, heads, K, BK, RUNS, C, GROUPED, MICRO_STEPS)
            if decays_beyond(tile[5], RANGE):
                return tl.full([], 1, tl.int32)
            P, N = scores_of_tile(
                tile, by_key, by_query, outputs, o_k, slot, K, BK, RUNS, C, STRONG, HAS_BETA, PRECISION
            )
            if i == 0:
                b_P, b_N = P, N
            else:
                b_P += P
                b_N += N
    store_scores(tl.where(diagonal | below, b_P * scale, 0.0), AP, slot, C, HAS_BETA)
    if HAS_BETA:
        tl.store(chunk_beta + slot * C + o_c, b_beta)
        L, gain = b_beta[:, None] * b_N, 0.0
        if BY_GAIN:
            gains = tl.where(diagonal, L, 0.0)
            if erase_key is not None:  # the gain of any two tokens, which together can flip the sign of the state
                gains = tl.abs(tl.where(diagonal | below, L, 0.0))
            gain = tl.max(tl.max(gains, 1), 0)
        store_inverse(tl.where(below, L, 0.0), gain, AP, large_gain, strict_L, slot, C, STRICT, BY_GAIN, PRECISION)
    return flag


@triton.jit(do_not_specialize=["strong_tiles", "T", "NT", "H", "HV"])
def prepare_channel_kernel(
    q, k, erase_key, beta, log_decay, AP, chunk_beta, G, strong_decay, large_gain, strict_L, q_in, k_in, k_out,
    cu_seqlens, chunk_sequence, chunk_offsets, scale, strong_tiles, T, NT, H, HV, K: tl.constexpr, BK: tl.constexpr,
    RUNS: tl.constexpr, STRONG_BK: tl.constexpr, STRONG_RUNS: tl.constexpr, C: tl.constexpr, HAS_BETA: tl.constexpr,
    STRICT: tl.constexpr, BY_GAIN: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, MICRO_STEPS: tl.constexpr,
):  # fmt: skip
    """Store A, P, step sizes, log2-decay G, q and k times their decays, and the flag `strong_decay` of every chunk.

    `k_in` has the erase keys if there are any.

    PART selects the chunks of a launch: all (0), those without strong decay, with the flags of all (1), or those with
    strong decay (2). Grid (HV, NT, B).
    """
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    if PART == 2:
        strong = tl.load(strong_decay + slot) != 0
    else:
        if rows <= 0:
            tl.store(strong_decay + slot, 0)
            if BY_GAIN:
                tl.store(large_gain + slot, 0)
            return
        flag = prepare_chunk(
            q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, q_in, k_in, k_out, slot, first,
            rows, i_h, scale, 0, H, HV, K, BK, RUNS, C, False, HAS_BETA, STRICT, BY_GAIN, GROUPED, PRECISION,
            MICRO_STEPS,
        )  # fmt: skip
        tl.store(strong_decay + slot, flag)
        if PART == 1:
            return
        strong = flag > 0
    if strong:
        tl.debug_barrier()  # other threads may have stored some of these rows before
        flag = prepare_chunk(
            q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, q_in, k_in, k_out, slot, first,
            rows, i_h, scale, strong_tiles, H, HV, K, STRONG_BK, STRONG_RUNS, C, True, HAS_BETA, STRICT, BY_GAIN,
            GROUPED, PRECISION, MICRO_STEPS,
        )  # fmt: skip
        tl.store(strong_decay + slot, flag)


@triton.jit(do_not_specialize=["chunks", "strong_tiles", "T", "NT", "H", "HV"])
def prepare_channel_rest_kernel(
    q, k, beta, log_decay, stopped, AP, chunk_beta, G, large_gain, strict_L, q_in, k_in, k_out, chunks, scale,
    strong_tiles, T, NT, H, HV, K: tl.constexpr, STRONG_BK: tl.constexpr, STRONG_RUNS: tl.constexpr, C: tl.constexpr,
    BY_GAIN: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the tensors of scans for the chunks at which and after which a fused kernel stopped.

    `stopped [B, HV]` has the first such chunk of every head, or NT. Few programs, each for up to 16 `chunks` of a head,
    since often there is nothing to do. Grid (HV, programs, B).
    """
    i_h, start, i_b = tl.program_id(0), tl.program_id(1) * chunks, tl.program_id(2)
    begin = tl.load(stopped + i_b * HV + i_h)
    end = tl.minimum(start + chunks, NT)
    slots, o = i_b.to(tl.int64) * NT * HV + i_h, start + tl.arange(0, 16)
    if BY_GAIN:
        tl.store(large_gain + slots + o.to(tl.int64) * HV, 0, mask=o < tl.minimum(begin, end))
    for i_t in tl.range(tl.maximum(begin, start), end, num_stages=1):
        first, slot = i_b.to(tl.int64) * T + i_t * C, slots + tl.cast(i_t, tl.int64) * HV
        prepare_chunk(
            q, k, None, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, q_in, k_in, k_out, slot, first,
            tl.minimum(T - i_t * C, C), i_h, scale, strong_tiles, H, HV, K, STRONG_BK, STRONG_RUNS, C, True, True,
            False, BY_GAIN, GROUPED, PRECISION, 1,
        )  # fmt: skip


@per_plan
def _constants(plan: Plan) -> list[Constants]:
    """The constants of one launch, or of two if the channels take several tiles: the second is for strong decay."""
    tiles = plan.tiles.prepare_channel
    return [
        Constants(
            *plan.chunk_grid(), strong_tiles=-(-plan.K // tiles["STRONG_BK"]), PART=part, **plan.precisions,
            **plan.per_chunk, **tiles,
        )
        for part in ((0,) if tiles["BK"] >= plan.K else (1, 2))
    ]  # fmt: skip


def launch_prepare_channel(p: Problem, kept: Kept, strict_L: Tensor | None) -> None:
    """Fill the kept tensors of chunks, and L of strict ones."""
    for constants in _constants(p.plan):
        launch(
            prepare_channel_kernel, constants,
            p.q, p.k, p.erase_key, p.beta, p.log_decay, kept.AP, kept.beta, kept.G, kept.strong_decay,
            kept.large_gain, strict_L, kept.q_in, kept.k_in, kept.k_out, *p.chunk_offsets,
        )  # fmt: skip


@per_plan
def _constants_of_rest(plan: Plan) -> Constants:
    chunks, tiles = plan.neighbours, plan.tiles.prepare_channel
    HV, NT, B = plan.chunk_grid()
    return Constants(
        HV, -(-NT // chunks), B, chunks=chunks, scale=plan.scale, strong_tiles=-(-plan.K // tiles["STRONG_BK"]),
        T=plan.T, NT=plan.NT, H=plan.H, HV=plan.HV, K=plan.K, STRONG_BK=tiles["STRONG_BK"],
        STRONG_RUNS=tiles["STRONG_RUNS"], C=CHUNK, BY_GAIN=plan.by_gain, GROUPED=plan.grouped, PRECISION="tf32",
        **plan.tiles.prepare,
    )  # fmt: skip


def launch_prepare_channel_rest(p: Problem, kept: Kept, strict_L: Tensor | None, stopped: Tensor) -> None:
    """Fill what scans read of the chunks that the fused forward pass left, and L of strict ones."""
    launch(
        prepare_channel_rest_kernel, _constants_of_rest(p.plan),
        p.q, p.k, p.beta, p.log_decay, stopped, kept.AP, kept.beta, kept.G, kept.large_gain, strict_L, kept.q_in,
        kept.k_in, kept.k_out,
    )  # fmt: skip
