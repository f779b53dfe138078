"""Output and final state in one kernel, from the inputs, and the tensors for the fused backward pass if it follows.

One program owns one value head of one sequence and walks through its chunks. Four groups of warps share the work:

* one warp copies q, k, v ahead and sums up the log-decays (`copy_chunks`);
* four warps compute, a chunk or two ahead of the state, the parts of a chunk that do not depend on the state
  (`prepare_chunks`): P, the inverses of the two diagonal blocks of 32 tokens, and the block of L below them;
* twice four warps carry the state of 64 value channels each (`carry_state`), transposed, in registers.

With `T = (diag(1 / beta) + L)^-1 = [[T11, 0], [-T22 L21 T11, T22]]` the corrections are U = T R with R = v - k_in S.
The last block of T is computed only if the backward pass will read it:

    U1 = T11 R1    U2 = T22 (R2 - L21 U1)

This is also more precise if a key repeats: the second half corrects the rounding of T11 in the first.

There is one barrier of each kind per stage. `full`: the inputs of a chunk have arrived. `ready`: its preparation has
ended. `empty`: the state has passed it. Nothing else has to wait. The state waits for `ready`, so at `empty` the
preparation no longer needs the inputs; and it overwrites its results only after the `full` of a later chunk, which
comes after `empty`. Shared memory that a thread writes for matrix products or for the copy engine passes first a proxy
fence of the thread that wrote it, and then a barrier of its warps. The order matters: readers wait for that barrier
only. Ordinary loads need the barriers only.
"""

import triton
from torch import Tensor

from deltazoo.ops.triton.chunk.decay_factors import LOG2_FLOOR, LOG2E
from deltazoo.ops.triton.gluon import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    matrix_tiles,
    mbarrier,
    reinterpret,
    states_tiles,
    tma,
    tma_load,
    tma_store,
    token_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.decayed_keys import add
from deltazoo.ops.triton.hopper.forward_chunks import (
    LOG2_DECAY,
    OUTPUT,
    SINCE_START,
    STEP,
    TO_END,
    TOTAL,
    VECTORS,
    halves,
    prepare_chunks,
)
from deltazoo.ops.triton.hopper.scan import HALF, C, D, as_tile
from deltazoo.ops.triton.launch import Constants, TileView, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem, contiguous
from deltazoo.ops.triton.tiles import CHUNK, fused_forward_options

NOWHERE = gl.constexpr(0x7FFF0000)  # a token beyond every sequence, where the copy engine drops writes


@triton.constexpr_function
def _tile_layout(dtype, rank):
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, rank)


@jit
def _read_scalar(x, warps: gl.constexpr):
    return gl.max(x.load(gl.BlockedLayout([1], [32], [warps], [0])), 0)


@jit
def copy_chunks(
    copied, DECAY: gl.constexpr, STOPS: gl.constexpr, KEEP: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr
):
    """Copy q, k and v of every chunk, and store its step sizes and factors of decay, by one warp."""
    tiles, rings, channel, bars, factors, large, steps, chunk_beta, chunk_G, scale, place, i_k, T, HV = copied
    i_b, i_h, first, slot, NC = place
    q_tiles, k_tiles, v_tiles, log_decay = tiles
    q_ring, k_ring, v_ring = rings
    _, _, _, gates, gates_full, gates_empty, _ = channel
    full, empty = bars
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, C, TOKENS)
    base = (i_b.to(gl.int64) * T + first) * HV + i_h
    slots = slot.to(gl.int64) * C
    c = 0
    end = NC
    while c < end:
        stage = c % STAGES
        token = first + c * C
        m_t = token + o_t < T
        b_beta = gl.load(steps + base + o_t * HV, mask=m_t, other=0.0).to(gl.float32)
        if DECAY == "scalar":
            g = gl.load(log_decay + base + o_t * HV, mask=m_t, other=0.0).to(gl.float32) * LOG2E
            g = gl.maximum(g, LOG2_FLOOR)
        mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
        if STOPS and c >= STAGES:
            end = gl.where(_read_scalar(large.index(stage), 1) != 0, c, end)  # the head stopped at chunk c - STAGES
        if c < end:
            bar = full.index(stage)
            mbarrier.expect(bar, (2 + QUERIES) * C * D * 2)
            tma_load(k_tiles, [i_b, token, i_k * D], bar, as_tile(k_ring.index(stage), D))
            if QUERIES:
                tma_load(q_tiles, [i_b, token, i_k * D], bar, as_tile(q_ring.index(stage), D))
            for half in gl.static_range(2):
                column = i_h * D + half * HALF
                v_half = v_ring.index(2 * stage + half)
                tma_load(v_tiles, [i_b, token, column], bar, as_tile(v_half, HALF))
            if DECAY == "channel":
                mbarrier.wait(gates_empty.index(0), (c & 1) ^ 1)
                mbarrier.expect(gates_full.index(0), C * D * gates.dtype.primitive_bitwidth // 8)
                gate_tile = reinterpret(gates, gates.dtype, [1, C, D], _tile_layout(gates.dtype, 3))
                tma_load(log_decay, [i_b, token, i_h * D], gates_full.index(0), gate_tile)
            vectors = stage * VECTORS
            if DECAY == "scalar":
                G = gl.associative_scan(g, 0, add)
                last = gl.sum(g, 0)
                if KEEP:
                    gl.store(chunk_G + slots + o_t, G)
                factors.index(vectors + LOG2_DECAY).store(G)
                factors.index(vectors + SINCE_START).store(gl.exp2(G))
                factors.index(vectors + OUTPUT).store(gl.exp2(G) * scale)
                factors.index(vectors + TO_END).store(gl.exp2(last - G))
                factors.index(vectors + TOTAL).store(gl.exp2(last + G * 0.0))
            if KEEP:
                gl.store(chunk_beta + slots + o_t, b_beta)
            factors.index(vectors + STEP).store(b_beta)
            mbarrier.arrive(bar, count=1)
            base += C * HV
            slots += C * HV
            c += 1
    # Copies of later chunks may still be on their way if the head stopped.
    if STOPS:
        for i in range(gl.maximum(c - STAGES, 0), c):
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        if DECAY == "channel":
            mbarrier.wait(gates_full.index(0), (c & 1) ^ 1)


@jit
def _store_output(tiles, coordinates, buffer, O):
    """Copy the transposed output of a chunk to memory, through `buffer`."""
    tma.store_wait(0)
    barrier()  # the thread that issued the last copy has waited for it
    buffer.permute((1, 0)).store(O)
    fence_async_shared()  # of every thread that wrote
    barrier()  # ... before one of them starts the copy
    tma_store(tiles, coordinates, as_tile(buffer, HALF))


@jit
def carry_state(
    carried, PART: gl.constexpr, DECAY: gl.constexpr, INITIAL: gl.constexpr, STOPS: gl.constexpr, KEEP: gl.constexpr,
    QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The state of value channels `PART * 64` on, from chunk to chunk, and store their outputs, by four warps."""
    tiles, rings, channel, bars, prepared, factors, large, buffers, ends, scale, place, B = carried
    i_b, i_h, first, _, NC = place
    initial, final, stopped = ends
    o_tiles, U_tiles, states_tiles = tiles
    output, U_buffers, states_buffers = buffers
    q_ring, k_ring, v_ring = rings
    written_ring, entries, totals, _, _, _, _ = channel
    full, empty = bars
    T_ring, L_ring, P_ring, ready = prepared
    DTYPE: gl.constexpr = output.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    CHUNK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    CHUNK_LEFT: gl.constexpr = gl.DotOperandLayout(0, CHUNK, 2)
    BLOCK_LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCK, 2)
    o_v = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, D, gl.SliceLayout(0, STATE))
    o_state = o_k.to(gl.int64)[None, :] * D + o_v.to(gl.int64)[:, None]
    if INITIAL:
        S = gl.load(initial + o_state)
    else:
        S = gl.full([HALF, D], 0.0, gl.float32, STATE)
    zero = gl.full([HALF, C], 0.0, gl.float32, CHUNK)
    none = gl.full([HALF, 32], 0.0, gl.float32, BLOCK)
    buffer, U_buffer, states_buffer = output.index(PART), U_buffers.index(PART), states_buffers.index(PART)
    column = i_h * D + PART * HALF
    token = gl.to_tensor(NOWHERE)  # there is no output before the first chunk
    O_before = zero.to(DTYPE)
    c = 0
    end = NC
    stopped_at = NC
    while c < end:
        stage = c % STAGES
        vectors = stage * VECTORS
        k, q = k_ring.index(stage), q_ring.index(stage)
        T, L, P = T_ring.index(stage), L_ring.index(stage), P_ring.index(stage)
        written = written_ring.index(stage) if DECAY == "channel" else k
        if DECAY == "channel":  # q and k contain the decay
            mbarrier.wait(ready.index(stage), (c // STAGES) & 1)
            S = S * entries.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
        S_left = gl.convert_layout(S.to(DTYPE), CHUNK_LEFT)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        Y = warpgroup_mma(S_left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP and QUERIES:  # output and corrections of the chunk before, and the state
            buffer.permute((1, 0)).store(O_before)
            states_buffer.store(S.to(DTYPE))
            fence_async_shared()
            barrier()
            tma_store(o_tiles, [i_b, token, column], as_tile(buffer, HALF))
            tma_store(U_tiles, [i_b, token, column], as_tile(U_buffer, HALF))
            at_state = [i_b + PART * B, first + c * C, i_h * D]
            tma_store(states_tiles, at_state, as_tile(states_buffer, D))
        elif QUERIES:
            _store_output(o_tiles, [i_b, token, column], buffer, O_before)
        v = v_ring.index(2 * stage + PART).permute((1, 0)).load(CHUNK)
        Y = warpgroup_mma_wait(0, deps=[Y])
        if DECAY == "scalar":
            since_start = factors.index(vectors + SINCE_START).load(gl.SliceLayout(0, CHUNK))
            Y = Y * since_start[None, :]
        R = v.to(gl.float32) - Y
        if KEEP:
            R = R * factors.index(vectors + STEP).load(gl.SliceLayout(0, CHUNK))[None, :]
        R1, R2 = halves(R, C)
        R1_left = gl.convert_layout(gl.convert_layout(R1, BLOCK).to(DTYPE), BLOCK_LEFT)
        R2 = gl.convert_layout(R2, BLOCK)
        if QUERIES:
            O = warpgroup_mma(S_left, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(stage), (c // STAGES) & 1)
        if QUERIES:
            O = warpgroup_mma_wait(0, deps=[O])
        if STOPS:  # in a chunk that this kernel must not process, T is zero and the state stays unchanged
            is_large = _read_scalar(large.index(stage), 4) != 0
            end = gl.where(is_large, c + 1, end)
            stopped_at = gl.where(is_large, c, stopped_at)
        U1 = warpgroup_mma(R1_left, T.slice(0, 32, dim=0).permute((1, 0)), none, use_acc=False, is_async=True)
        if QUERIES:
            if DECAY == "scalar":
                O = O * factors.index(vectors + OUTPUT).load(gl.SliceLayout(0, CHUNK))[None, :]
            else:
                O = O * scale
        if DECAY == "scalar":
            total = factors.index(vectors + TOTAL).load(gl.SliceLayout(1, STATE))
            S = S * total[:, None]
        U1 = warpgroup_mma_wait(0, deps=[U1])
        U1_left = gl.convert_layout(U1.to(DTYPE), BLOCK_LEFT)
        if KEEP and QUERIES:
            tma.store_wait(0)
            barrier()
            U_buffer.slice(0, 32, dim=0).permute((1, 0)).store(U1.to(DTYPE))
        R2 = warpgroup_mma(U1_left, L.slice(32, 32, dim=0).permute((1, 0)), R2, is_async=True)
        # The products of S and O take U1 from registers of their own; otherwise ptxas makes all products wait (C7512).
        if QUERIES:
            U1_out = U1_left if DECAY == "scalar" else gl.convert_layout((U1 * scale).to(DTYPE), BLOCK_LEFT)
        if DECAY == "scalar":
            to_end = factors.index(vectors + TO_END)
            U1 = U1 * to_end.slice(0, 32).load(gl.SliceLayout(0, BLOCK))[None, :]
        U1 = gl.convert_layout(U1.to(DTYPE), STATE_LEFT)
        R2 = warpgroup_mma_wait(0, deps=[R2])
        R2_left = gl.convert_layout(R2.to(DTYPE), BLOCK_LEFT)
        U2 = warpgroup_mma(R2_left, T.slice(32, 32, dim=0).permute((1, 0)), none, use_acc=False, is_async=True)
        S = warpgroup_mma(U1, written.slice(0, 32, dim=0), S, is_async=True)
        if QUERIES:
            U1_out = gl.convert_layout(U1_out, CHUNK_LEFT)
            O = warpgroup_mma(U1_out, P.slice(0, 32, dim=1).permute((1, 0)), O, is_async=True)
            U2, S, O = warpgroup_mma_wait(0, deps=[U2, S, O])
            if KEEP:
                U_buffer.slice(32, 32, dim=0).permute((1, 0)).store(U2.to(DTYPE))
            U2_out = gl.convert_layout((U2 if DECAY == "scalar" else U2 * scale).to(DTYPE), CHUNK_LEFT)
        else:
            U2, S = warpgroup_mma_wait(0, deps=[U2, S])
        if DECAY == "scalar":
            U2 = U2 * to_end.slice(32, 32).load(gl.SliceLayout(0, BLOCK))[None, :]
        S = warpgroup_mma(gl.convert_layout(U2.to(DTYPE), STATE_LEFT), written.slice(32, 32, dim=0), S, is_async=True)
        if QUERIES:
            O = warpgroup_mma(U2_out, P.slice(32, 32, dim=1).permute((1, 0)), O, is_async=True)
            S, O = warpgroup_mma_wait(0, deps=[S, O])
            O_before = O.to(DTYPE)
            token = first + c * C
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        barrier()  # all warps have read the operands
        mbarrier.arrive(empty.index(stage), count=1)
        c += 1
    if DECAY == "channel":
        S = S * totals.index((c - 1) % STAGES).load(gl.SliceLayout(0, STATE))[None, :]
    if QUERIES:
        _store_output(o_tiles, [i_b, token, column], buffer, O_before)
    if KEEP and QUERIES:
        tma_store(U_tiles, [i_b, token, column], as_tile(U_buffer, HALF))
    gl.store(final + o_state, S)
    if STOPS and PART == 0:
        gl.store(stopped, stopped_at)
    tma.store_wait(0)


@jit(do_not_specialize=["T", "segments", "chunks", "H", "HV"])
def hopper_forward_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, beta, log_decay, initial, final, stopped, large_gain, U_tiles, states_tiles,
    AP_tiles, chunk_beta, chunk_G, scale, T, segments, chunks, H, HV, DECAY: gl.constexpr, INITIAL: gl.constexpr,
    BY_GAIN: gl.constexpr, KEEP: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Store output and final states; DECAY is "none", "scalar" (per head) or "channel". Grid (B * segments * HV,).

    Rows are cut into segments of `chunks` chunks, with states of their own: `initial` and `final [B * segments, HV, K,
    V]`.

    A program stops at the first chunk that it must not process: with BY_GAIN one whose largest erase gain needs strict
    precision, per channel one that decays too far (`decayed_keys`). It stores the number of this chunk, from the
    segment's start, in `stopped [B * segments, HV]` (the number of chunks if there is none), and the state that enters
    it in `final`. Outputs from this chunk on are not valid; `large_gain`, if given, is 1 from it on and 0 before. With
    KEEP, without decay or with one per head, it also stores tensors for the backward pass. Without QUERIES, with KEEP,
    it stores of all this the final states and what other scans of the segments read of the chunks but P.
    """
    DTYPE: gl.constexpr = k_tiles.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i = gl.program_id(0)
    i_n = i // HV
    i_h = i % HV
    i_k = i_h // (HV // H)
    i_b, first_chunk = i_n // segments, i_n % segments * chunks
    NT = (T + C - 1) // C
    NC = gl.minimum(NT - first_chunk, chunks)
    first, slot = first_chunk * C, (i_b * NT + first_chunk) * HV + i_h
    STOPS: gl.constexpr = BY_GAIN or DECAY == "channel"
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    v_ring = gl.allocate_shared_memory(DTYPE, [2 * STAGES, C, HALF], OPERAND)
    q_ring, output, P_ring = (k_ring,) * 3
    if QUERIES:
        q_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
        output = gl.allocate_shared_memory(DTYPE, [2, C, HALF], OPERAND)
        P_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, C], OPERAND)
    T_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, 32], NARROW)
    L_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, 32], NARROW)
    factors = gl.allocate_shared_memory(gl.float32, [VECTORS * STAGES, C], VECTOR)
    order = gl.allocate_shared_memory(gl.float32, [C], VECTOR)
    gains = gl.allocate_shared_memory(gl.float32, [4], VECTOR)
    large = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    diagonal = gl.allocate_shared_memory(gl.float32, [C, 16], PLAIN)
    inverses = gl.allocate_shared_memory(DTYPE, [4, 16, 16], gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
    written_ring, entries, totals, gates, fewest, gates_full, gates_empty = (factors,) * 7
    if DECAY == "channel":
        written_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
        entries = gl.allocate_shared_memory(gl.float32, [STAGES, D], VECTOR)
        totals = gl.allocate_shared_memory(gl.float32, [STAGES, D], VECTOR)
        gates = gl.allocate_shared_memory(log_decay.dtype, [C, D], _tile_layout(log_decay.dtype, 2))
        fewest = gl.allocate_shared_memory(gl.float32, [4], VECTOR)
        gates_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        gates_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(gates_full.index(0), count=1)
        mbarrier.init(gates_empty.index(0), count=1)
    U_buffers, states_buffers, A_buffer, P_buffer, corner = (output,) * 5
    if KEEP:
        if QUERIES:
            U_buffers = gl.allocate_shared_memory(DTYPE, [2, C, HALF], OPERAND)
            states_buffers = gl.allocate_shared_memory(DTYPE, [2, HALF, D], OPERAND)
            P_buffer = gl.allocate_shared_memory(DTYPE, [C, C], OPERAND)
        A_buffer = gl.allocate_shared_memory(DTYPE, [C, C], OPERAND)
        corner = gl.allocate_shared_memory(DTYPE, [C, 32], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=2)  # the copies, and the factors
        mbarrier.init(empty.index(n), count=2)  # the two partitions of the state
        mbarrier.init(ready.index(n), count=1)
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    order.store(gl.arange(0, C, SPREAD).to(gl.float32) * 1073741824.0)
    if DECAY == "channel":  # after the chunk before the first
        totals.index(STAGES - 1).store(gl.full([D], 1.0, gl.float32, SPREAD))
    fence_async_shared()
    barrier()
    state = i.to(gl.int64) * (D * D)
    final += state
    if STOPS:
        stopped += i
    if INITIAL:
        initial += state
    tiles = (q_tiles, k_tiles, v_tiles, log_decay)
    rings = (q_ring, k_ring, v_ring)
    channel = (written_ring, entries, totals, gates, gates_full, gates_empty, fewest)
    bars = (full, empty)
    prepared = (T_ring, L_ring, P_ring, ready)
    scratch = (diagonal, inverses, gains, order)
    place = (i_b, i_h, first, slot, NC)
    kept = (AP_tiles, A_buffer, P_buffer, corner, slot, HV)
    out_tiles, buffers, B = (
        (o_tiles, U_tiles, states_tiles),
        (output, U_buffers, states_buffers),
        gl.num_programs(0) // HV // segments,
    )
    carried = (
        out_tiles, rings, channel, bars, prepared, factors, large, buffers, (initial, final, stopped), scale,
        place, B,
    )  # fmt: skip
    copied = (
        tiles, rings, channel, bars, factors, large, beta, chunk_beta, chunk_G, scale, place, i_k, T, HV
    )  # fmt: skip
    prepared_chunks = (rings, channel, bars, prepared, factors, large, scratch, kept, large_gain, scale, NC)
    gl.warp_specialize(
        [
            (carry_state, (carried, 0, DECAY, INITIAL, STOPS, KEEP, QUERIES, STAGES)),
            (carry_state, (carried, 1, DECAY, INITIAL, STOPS, KEEP, QUERIES, STAGES)),
            (prepare_chunks, (prepared_chunks, DECAY, BY_GAIN, KEEP, QUERIES, STAGES)),
            (copy_chunks, (copied, DECAY, STOPS, KEEP, QUERIES, STAGES)),
        ],
        [4, 4, 1],
        [STATE_REGISTERS, PREPARE_REGISTERS, COPY_REGISTERS],
    )


@per_plan
def _constants(plan: Plan, initial: bool, keep: bool, output: bool) -> Constants:
    return Constants(
        plan.scans * plan.HV, scale=plan.scale, T=plan.T, segments=plan.segments, chunks=plan.segment_chunks, H=plan.H,
        HV=plan.HV, DECAY=plan.decay, INITIAL=initial, BY_GAIN=plan.by_gain, KEEP=keep, QUERIES=output,
        **fused_forward_options(keep, plan.decay, output),
    )  # fmt: skip


def launch_forward(
    p: Problem, kept: Kept | None, initial: Tensor | None, output: Tensor | None, final: Tensor,
    stopped: Tensor | None = None, large_gain: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill output, final state, the number of the chunk at which each head `stopped`, and `kept` if it is given.

    `large_gain`, if given, is 1 from this chunk on and 0 before. Without `output`, of `kept` it fills A, step sizes and
    decay only.
    """
    plan, log_decay = p.plan, p.log_decay
    filled: tuple[TileView | Tensor | None, ...] = (None,) * 5
    if kept is not None:
        assert kept.AP is not None
        U = None if kept.U is None else token_tiles(kept.U, plan.V // 2)
        states = None if kept.states is None else states_tiles(kept.states)
        filled = U, states, matrix_tiles(kept.AP, CHUNK), kept.beta, kept.G
    gates: TileView | Tensor | None = log_decay
    if plan.per_channel:
        assert log_decay is not None
        gates = token_tiles(contiguous(log_decay if log_decay.itemsize < 8 else log_decay.float(), plan), plan.K)
    launch(
        hopper_forward_kernel, _constants(plan, initial is not None, kept is not None, output is not None),
        None if output is None else token_tiles(p.q, plan.K),
        token_tiles(p.k, plan.K), token_tiles(p.v, plan.V // 2),
        None if output is None else token_tiles(output, plan.V // 2),
        p.beta, gates, initial, final, stopped, large_gain, *filled,
    )  # fmt: skip
