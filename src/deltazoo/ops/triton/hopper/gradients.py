"""The backward pass of the delta rule in one kernel for Hopper, in Gluon; no decay, or one per head, and 128 channels.

One program walks the chunks of a value head of a sequence, or of a segment of it, from the last to the first. Its warps
are specialised:

* two groups of four `walk`: each carries the gradient of the state, of half the value channels, and computes Z; the
  first also computes the gradient of P, the second that of L, and d_beta;
* one group of four computes the other `gradients` of the chunk that they have just passed;
* one warp `copies` the operands from memory.

The formulas and roundings are those of `chunk.scan` and `chunk.gradients` (docs/math.md, section 9), with two
differences: dS never goes to memory, and the sum over a chunk with which d_log_decay begins is `<S, dS>` of the state
that enters the chunk, which the walk has in registers.

A launch with STRICT computes the gradients of heads with a large erase gain: the walk multiplies with two terms where
the serial scans do.

Gradients may lie in the memory of their chunk's inputs: dv in that of U, dq and dk in that of the state, `[2, B,
tokens, HV, D]`, whose value channels stand in place of tokens. A program reads and writes only the tiles of its own
head, and computes the replacement of a tile from its copy in shared memory.
"""

from torch import Tensor

from deltazoo.ops.triton.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    matrix_tiles,
    mbarrier,
    states_tiles,
    tma,
    tma_load,
    tma_store,
    token_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.gradients_walk import (
    ENTRY,
    EXIT,
    LOG,
    ORDER,
    PAIRS,
    ROW,
    ROWS,
    SPACING,
    STEP,
    first_ten,
    gradient_of_L,
    gradient_of_P,
    last_five,
    row_products,
    store_step_gradients,
    walk,
)
from deltazoo.ops.triton.hopper.scan import HALF, C, D, as_tile
from deltazoo.ops.triton.hopper.small_step_gradients import SMALL_STEP
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Gradients, Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK, FUSED_BACKWARD


@jit
def copy_stage(tiles, buffers, bars, gates, beta, G, place, token, slot, n, DECAY: gl.constexpr):
    """Copy k, dO and U of a chunk, and store factors of its decays and step sizes."""
    q_tiles, k_tiles, dO_tiles, U_tiles, AP_tiles, S_tiles, dq_tiles, dk_tiles, dv_tiles = tiles
    k_buffer, dO_buffer, U_buffer, q_buffer, S_buffer, A_buffer, P_buffer, dS_buffer, Z_buffer, W_buffer = buffers
    full, empty, single = bars
    scale, row, head, column, key_column, first_slot, first, B, T, HV, NC, ZERO = place
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_c = gl.arange(0, C, TOKENS)
    step = gl.load(beta + slot.to(gl.int64) * C + o_c)
    if DECAY == "scalar":
        g = gl.load(G + slot.to(gl.int64) * C + o_c)
        last = gl.load(G + slot.to(gl.int64) * C + C - 1)
    s = n % 2
    mbarrier.wait(empty.index(s), ((n // 2) & 1) ^ 1)
    bar = full.index(s)
    mbarrier.expect(bar, 3 * C * D * 2)
    tma_load(k_tiles, [row, token, key_column], bar, as_tile(k_buffer.index(s), D))
    tma_load(dO_tiles, [row, token, column], bar, as_tile(dO_buffer.index(s), D))
    tma_load(U_tiles, [row, token, column], bar, as_tile(U_buffer.index(s), D))
    gates.index(ROWS * s + STEP).store(step)
    if DECAY == "scalar":
        gates.index(ROWS * s + ENTRY).store(gl.exp2(g))
        gates.index(ROWS * s + EXIT).store(gl.exp2(last - g))
        gates.index(ROWS * s + LOG).store(g)
    mbarrier.arrive(bar, count=1)


@jit
def copies(tiles, buffers, bars, gates, beta, G, place, DECAY: gl.constexpr):
    """Copy the operands of all chunks, by one warp."""
    q_tiles, k_tiles, dO_tiles, U_tiles, AP_tiles, S_tiles, dq_tiles, dk_tiles, dv_tiles = tiles
    k_buffer, dO_buffer, U_buffer, q_buffer, S_buffer, A_buffer, P_buffer, dS_buffer, Z_buffer, W_buffer = buffers
    full, empty, single = bars
    q_full, q_empty, S_full, S_empty, AP_full, AP_empty, dS_full, dS_empty, Z_full, Z_empty = first_ten(single)
    scale, row, head, column, key_column, slot, first, B, T, HV, NC, ZERO = place
    if NC > 0:
        last = slot + (NC - 1) * HV
        copy_stage(tiles, buffers, bars, gates, beta, G, place, first + (NC - 1) * C, last, 0, DECAY)
    for n in range(NC):
        c = NC - 1 - n
        token, chunk = first + c * C, slot + c * HV
        parity = (n & 1) ^ 1
        mbarrier.wait(AP_empty, parity)
        mbarrier.expect(AP_full, 2 * C * C * 2)
        tma_load(AP_tiles, [chunk * 2 * C + C, 0], AP_full, P_buffer)
        tma_load(AP_tiles, [chunk * 2 * C, 0], AP_full, A_buffer)
        mbarrier.wait(q_empty, parity)
        mbarrier.expect(q_full, C * D * 2)
        tma_load(q_tiles, [row, token, key_column], q_full, as_tile(q_buffer.index(0), D))
        mbarrier.wait(S_empty, parity)
        mbarrier.expect(S_full, 2 * HALF * D * 2)
        for part in gl.static_range(2):
            tile = as_tile(S_buffer.index(part), D)
            tma_load(S_tiles, [row + part * B, token, column], S_full, tile)
        if c > 0:
            copy_stage(tiles, buffers, bars, gates, beta, G, place, token - C, chunk - HV, n + 1, DECAY)


@jit
def gradients(tiles, buffers, bars, gates, d_beta, d_G, place, DECAY: gl.constexpr, STRICT: gl.constexpr):
    """Store the gradients of q, k and, with decay, G of each chunk, from those of P and L; with STRICT these, too.

    W_P and W_L have a buffer each, but with STRICT one, since the second term of A takes the other.
    dq goes to the buffer of dO and dk to that of U, when nobody reads these any more.
    """
    q_tiles, k_tiles, dO_tiles, U_tiles, AP_tiles, S_tiles, dq_tiles, dk_tiles, dv_tiles = tiles
    k_buffer, dO_buffer, U_buffer, q_buffer, S_buffer, A_buffer, P_buffer, dS_buffer, Z_buffer, W_buffer = buffers
    full, empty, single = bars
    q_full, q_empty, S_full, S_empty, AP_full, AP_empty, dS_full, dS_empty, Z_full, Z_empty = first_ten(single)
    WP_full, WP_empty, WL_full, WL_empty, A_split = last_five(single)
    scale, row, head, column, key_column, slot, first, B, T, HV, NC, ZERO = place
    DTYPE: gl.constexpr = k_buffer.dtype
    SMALL: gl.constexpr = SMALL_STEP
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    KEYS_LEFT: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    KEY_ROW: gl.constexpr = gl.SliceLayout(1, KEYS)
    zero = gl.full([C, C], 0.0, gl.float32, PAIRS)
    zero_keys = gl.full([C, D], 0.0, gl.float32, KEYS)
    o_c = gl.arange(0, C, ROW)
    for n in range(NC):
        s = n % 2
        z = n & ZERO
        parity = n & 1
        token = first + (NC - 1 - n) * C
        k, q, dO, U = k_buffer.index(s), q_buffer.index(z), dO_buffer.index(s), U_buffer.index(s)
        W_P, W_L = W_buffer.index(0 + z), W_buffer.index((0 if STRICT else 1) + z)
        mbarrier.wait(full.index(s), (n // 2) & 1)

        # The gradient of a key as write key: exit o (U dS) + W_P^T q + W_L^T k
        mbarrier.wait(dS_full, parity)
        written = warpgroup_mma(
            U.slice(0, HALF, dim=1), dS_buffer.index(0 + z), zero_keys, use_acc=False, is_async=True
        )  # fmt: skip
        written = warpgroup_mma(U.slice(HALF, HALF, dim=1), dS_buffer.index(1 + z), written, is_async=True)
        if STRICT:
            W_P.store(gradient_of_P(dO_buffer, U_buffer, gates, scale, s, z, DECAY))
            fence_async_shared()
        tma.store_wait(0)  # the buffers of dO and U of the chunk before are free
        barrier()
        if n > 0:
            mbarrier.arrive(empty.index(s ^ 1), count=1)
        mbarrier.wait(S_full, parity)
        written = warpgroup_mma_wait(0, deps=[written])
        mbarrier.arrive(dS_empty, count=1)
        if DECAY == "scalar":
            written = written * gates.index(ROWS * s + EXIT).load(KEY_ROW)[:, None]
        mbarrier.wait(q_full, parity)
        if not STRICT:
            mbarrier.wait(WP_full, parity)
        written = warpgroup_mma(W_P.permute((1, 0)), q, written, is_async=True)

        # dq = scale entry o (dO S) + W_P k, in two halves of the key channels
        if DECAY == "scalar":
            dG = gl.full([C], 0.0, gl.float32, ROW)
        for m in gl.static_range(2):
            S0, S1 = S_buffer.index(0 + z).slice(64 * m, 64, dim=1), S_buffer.index(1 + z).slice(64 * m, 64, dim=1)
            d_query = warpgroup_mma(dO.slice(0, HALF, dim=1), S0, zero, use_acc=False, is_async=True)
            d_query = warpgroup_mma(dO.slice(HALF, HALF, dim=1), S1, d_query, is_async=True)
            d_query, written = warpgroup_mma_wait(0, deps=[d_query, written])
            if DECAY == "scalar":
                d_query = d_query * (gates.index(ROWS * s + ENTRY).load(ROW) * scale)[:, None]
            else:
                d_query = d_query * scale
            d_query = warpgroup_mma(W_P, k.slice(64 * m, 64, dim=1), d_query, is_async=True)
            d_query = warpgroup_mma_wait(0, deps=[d_query])
            if DECAY == "scalar":
                dG += row_products(q.slice(64 * m, 64, dim=1).load(PAIRS).to(gl.float32), d_query)
            if m == 0:
                d_query_0 = d_query.to(DTYPE)
            else:
                d_query_1 = d_query.to(DTYPE)
        mbarrier.arrive(q_empty, count=1)
        if not STRICT:
            mbarrier.arrive(WP_empty, count=1)
        barrier()  # the products of all warps with dO and W_P are done
        dO.slice(0, 64, dim=1).store(d_query_0)
        dO.slice(64, 64, dim=1).store(d_query_1)
        if STRICT:
            mbarrier.wait(Z_full, parity)
            b_L, d_steps = gradient_of_L(Z_buffer, U_buffer, gates, s, z, DECAY)
            W_L.store(b_L)
            store_step_gradients(d_beta, d_steps, place, n)
        fence_async_shared()
        barrier()
        tma_store(dq_tiles, [row, token, column], as_tile(dO, D))

        if not STRICT:
            mbarrier.wait(WL_full, parity)
        written = warpgroup_mma(W_L.permute((1, 0)), k, written, is_async=True)
        # The gradient of a key as erase key: beta o (W_L k - entry o (Z S))
        Z0, Z1 = Z_buffer.index(0 + z), Z_buffer.index(1 + z)
        steps = gates.index(ROWS * s + STEP).load(ROW)
        erase = gl.where(steps > SMALL, -1.0, -steps)  # the factor of beta that Z lacks
        if DECAY == "scalar":
            erase = erase * gates.index(ROWS * s + ENTRY).load(ROW)
        z0 = gl.convert_layout((Z0.load(PAIRS).to(gl.float32) * erase[:, None]).to(DTYPE), KEYS_LEFT)
        z1 = gl.convert_layout((Z1.load(PAIRS).to(gl.float32) * erase[:, None]).to(DTYPE), KEYS_LEFT)
        mbarrier.arrive(Z_empty, count=1)
        if DECAY == "scalar":
            written = warpgroup_mma_wait(0, deps=[written])
            as_written = row_products(k.load(KEYS).to(gl.float32), written)
        dk_sum = warpgroup_mma(W_L, k, written, is_async=True)
        dk_sum = warpgroup_mma(z0, S_buffer.index(0 + z), dk_sum, is_async=True)
        dk_sum = warpgroup_mma(z1, S_buffer.index(1 + z), dk_sum, is_async=True)
        dk_sum = warpgroup_mma_wait(0, deps=[dk_sum])
        if not STRICT:
            mbarrier.arrive(WL_empty, count=1)
        mbarrier.arrive(S_empty, count=1)
        if DECAY == "scalar":
            both = row_products(k.load(KEYS).to(gl.float32), dk_sum)
            dG += gl.convert_layout(both - 2.0 * as_written, ROW)
            gl.store(d_G + (row * T + token + o_c) * HV + head, dG, mask=token + o_c < T)
        U.store(dk_sum.to(DTYPE))
        fence_async_shared()
        barrier()
        tma_store(dk_tiles, [row, token, column], as_tile(U, D))
    tma.store_wait(0)


@jit(do_not_specialize=["T", "H", "HV", "segments", "chunks", "ZERO"])
def backward_kernel(
    q_tiles, k_tiles, dO_tiles, U_tiles, AP_tiles, S_tiles, dq_tiles, dk_tiles, dv_tiles, beta, G, large_gain, d_beta,
    d_G, overlap, d_final, d_initial, scale, T, H, HV, segments, chunks, ZERO, DECAY: gl.constexpr,
    STRICT: gl.constexpr, WALK_REGISTERS: gl.constexpr, GRADIENT_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Store all gradients of a value head of a row, or of one of its `segments` of `chunks` chunks; grid (N * HV).

    The first arguments are tiles for the copy engine: `[C, D]` of q, k, dO, U, S, dq and dk, `[C, HALF]` of AP and dv.
    With `large_gain` the launch with STRICT computes heads with a flagged chunk, and the launch without it all others.
    ZERO is 0: the compiler does not know an index with `n & ZERO`, so it does not keep every address in a register; nor
    counters of its own, which it would for a multiple of n.
    """
    DTYPE: gl.constexpr = k_tiles.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    program = gl.program_id(0)
    i_n, i_h = program // HV, program % HV
    row, first_chunk = i_n // segments, i_n % segments * chunks
    column, key_column = i_h * D, i_h // (HV // H) * D
    slot = (row * gl.cdiv(T, C) + first_chunk) * HV + i_h
    NC = gl.minimum(gl.cdiv(T, C) - first_chunk, chunks)
    if large_gain is not None:
        o_flag = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))  # all flags in every warp
        found = 0
        for start in range(0, NC, 32):
            chunk = start + o_flag
            flags = gl.load(large_gain + slot + chunk.to(gl.int64) * HV, mask=chunk < NC, other=0)
            found = gl.maximum(found, gl.max(flags, 0))
        NC = gl.where((found != 0) == STRICT, NC, 0)
    k_buffer = gl.allocate_shared_memory(DTYPE, [2, C, D], TILE)
    dO_buffer = gl.allocate_shared_memory(DTYPE, [2, C, D], TILE)
    U_buffer = gl.allocate_shared_memory(DTYPE, [2, C, D], TILE)
    q_buffer = gl.allocate_shared_memory(DTYPE, [1, C, D], TILE)
    S_buffer = gl.allocate_shared_memory(DTYPE, [2, HALF, D], TILE)
    A_buffer = gl.allocate_shared_memory(DTYPE, [C, C], TILE)
    P_buffer = gl.allocate_shared_memory(DTYPE, [C, C], TILE)
    dS_buffer = gl.allocate_shared_memory(DTYPE, [2, HALF, D], TILE)
    Z_buffer = gl.allocate_shared_memory(DTYPE, [2, C, HALF], TILE)
    W_buffer = gl.allocate_shared_memory(DTYPE, [2, C, C], TILE)
    gates = gl.allocate_shared_memory(gl.float32, [2 * ROWS + 1, C], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    single = gl.allocate_shared_memory(gl.int64, [15, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=3)
    # full and empty: q, S, A and P, dS, Z; then W_P and W_L
    mbarrier.init(single.index(0), count=1)
    mbarrier.init(single.index(1), count=3)
    mbarrier.init(single.index(2), count=1)
    mbarrier.init(single.index(3), count=3 if DECAY == "scalar" else 1)
    mbarrier.init(single.index(4), count=1)
    mbarrier.init(single.index(5), count=2)
    mbarrier.init(single.index(6), count=2)
    mbarrier.init(single.index(7), count=1)
    mbarrier.init(single.index(8), count=2)
    mbarrier.init(single.index(9), count=1)
    for i in gl.static_range(10, 14):
        mbarrier.init(single.index(i), count=1)
    mbarrier.init(single.index(14), count=2)  # the two terms of A are separate
    gates.index(ORDER).store(gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0])).to(gl.float32) * SPACING)
    fence_async_shared()
    tiles = (q_tiles, k_tiles, dO_tiles, U_tiles, AP_tiles, S_tiles, dq_tiles, dk_tiles, dv_tiles)
    buffers = (k_buffer, dO_buffer, U_buffer, q_buffer, S_buffer, A_buffer, P_buffer, dS_buffer, Z_buffer, W_buffer)
    bars = full, empty, single
    rows = gl.num_programs(0) // (HV * segments)
    # The place of the program: its head in the tensors, its first slot and token, and the sizes that all partitions
    # need.
    place = (scale, row, i_h, column, key_column, slot, first_chunk * C, rows, T, HV, NC, ZERO)
    # A tuple in a variable would turn constants into run-time values, so the arguments stand here.
    gl.warp_specialize(
        [
            (walk, (dv_tiles, buffers, bars, gates, G, overlap, d_beta, d_final, d_initial, place, 0, DECAY, STRICT)),
            (walk, (dv_tiles, buffers, bars, gates, G, overlap, d_beta, d_final, d_initial, place, 1, DECAY, STRICT)),
            (gradients, (tiles, buffers, bars, gates, d_beta, d_G, place, DECAY, STRICT)),
            (copies, (tiles, buffers, bars, gates, beta, G, place, DECAY)),
        ],
        [4, 4, 1],
        [WALK_REGISTERS, GRADIENT_REGISTERS, COPY_REGISTERS],
    )


@per_plan
def _constants(plan: Plan, strict: bool) -> Constants:
    return Constants(
        plan.scans * plan.HV, scale=plan.scale, T=plan.T, H=plan.H, HV=plan.HV, segments=plan.segments,
        chunks=plan.segment_chunks, ZERO=0, DECAY=plan.decay, STRICT=strict, **FUSED_BACKWARD,
    )  # fmt: skip


def launch_gradients(
    p: Problem, kept: Kept, U: Tensor, states: Tensor, d_output: Tensor, d_final: Tensor | None, gradients: Gradients,
    d_G: Tensor | None, overlap: Tensor | None, d_initial: Tensor | None,
) -> None:  # fmt: skip
    """Fill `d_initial` and the gradients except that of log_decay, for which it fills `d_G` and the sums `overlap`."""
    plan, (dq, dk, _, dv, d_beta, _) = p.plan, gradients
    assert kept.AP is not None
    for strict in plan.scan_modes:  # by the gain each of both computes the gradients of some heads
        launch(
            backward_kernel, _constants(plan, strict),
            token_tiles(p.q, plan.K), token_tiles(p.k, plan.K), token_tiles(d_output, plan.V), token_tiles(U, plan.V),
            matrix_tiles(kept.AP, CHUNK), states_tiles(states),
            token_tiles(dq, plan.K), token_tiles(dk, plan.K), token_tiles(dv, plan.V // 2),
            kept.beta, kept.G, kept.large_gain, d_beta, d_G, overlap, d_final, d_initial,
        )  # fmt: skip
