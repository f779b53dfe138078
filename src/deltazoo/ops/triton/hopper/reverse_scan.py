"""The reverse scan on Hopper: the gradient of the state from the last chunk to the first.

Like `scan`, it has two partitions that hold the gradient for 64 value channels each, and one warp that copies operands.
Beside the stored gradients, shared memory holds three chunks of queries, keys and output gradients, but only two of the
matrices, which are needed later in a chunk; so these have a ring of buffers of their own.
"""

from torch import Tensor

from deltazoo.ops.triton.chunk.score_gradients import NEAR_ZERO
from deltazoo.ops.triton.gluon import (
    fence_async_shared,
    gl,
    jit,
    matrix_tiles,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    token_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.scan import (
    ERASE,
    HALF,
    LEFT,
    LEFT_STATE,
    OUT,
    STATE,
    TOKENS,
    WRITE,
    C,
    D,
    as_tile,
    decayed,
    factor,
    first_large,
    gluon_scan_arguments,
    store_factors,
    store_tile,
)
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK, gluon_reverse_scan_options


@jit
def copy_partition(
    tiles, rings, barriers, factors, totals, beta, G, place, DECAY: gl.constexpr, UNDECAYED: gl.constexpr,
    SEPARATE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of `count` chunks, the last one first, and store their factors."""
    scale, row, first, key_column, value_column, slot, HV, count = place
    q_tiles, k_in_tiles, k_out_tiles, d_output_tiles, AP_tiles = tiles
    q_ring, k_in_ring, k_out_ring, d_output_ring, AP_ring = rings
    full, empty, late_full, late_empty = barriers
    ROWS: gl.constexpr = 3 if DECAY == "scalar" else 1
    KEYS: gl.constexpr = 2 if SEPARATE else 1
    BYTES: gl.constexpr = (KEYS + 1) * C * D * 2 + PARTS * C * HALF * 2
    for i in range(count):
        stage = i % STAGES
        late = i % LATE_STAGES
        chunk = count - 1 - i
        token = first + chunk * C
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        at_keys = [row, token, key_column]
        for part in gl.static_range(PARTS):
            at_values = [row, token, value_column + part * HALF]
            d_output = as_tile(d_output_ring.index(stage * PARTS + part), HALF)
            tma_load(d_output_tiles, at_values, bar, d_output)
        tma_load(k_out_tiles, at_keys, bar, as_tile(k_out_ring.index(stage), D))
        tma_load(q_tiles, at_keys, bar, as_tile(q_ring.index(stage), D))
        if SEPARATE:
            tma_load(k_in_tiles, at_keys, bar, as_tile(k_in_ring.index(stage), D))
        store_factors(factors, totals, stage, beta, G, slot + chunk * HV, scale, ROWS, DECAY, UNDECAYED)
        mbarrier.arrive(bar, count=1)
        mbarrier.wait(late_empty.index(late), ((i // LATE_STAGES) & 1) ^ 1)
        mbarrier.expect(late_full.index(late), 2 * C * C * 2)
        at_matrices = [(slot + chunk * HV) * (2 * C), 0]
        tma_load(AP_tiles, at_matrices, late_full.index(late), AP_ring.index(late))


@jit
def gradient_partition(
    walk, PART: gl.constexpr, DECAY: gl.constexpr, BY_GAIN: gl.constexpr, HAS_FINAL: gl.constexpr,
    HAS_INITIAL: gl.constexpr, KEEP: gl.constexpr, SCALED: gl.constexpr, IN_PLACE: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """Carry the gradient for 64 value channels of the state through `count` chunks, the last one first."""
    tiles, rings, barriers, factors, totals, buffers, d_final, d_initial, place, handed_on = walk
    scale, row, first, value_column, slot, HV, count, state_slot = place
    Z_tiles, d_states_tiles, d_states_high_tiles = tiles
    q_ring, k_in_ring, k_out_ring, d_output_ring, AP_ring = rings
    full, empty, late_full, late_empty = barriers
    Z_buffers, d_states_buffers = buffers
    Z_buffer = Z_buffers.index(PART)
    d_states_buffer = d_states_buffers.index(PART)
    DTYPE: gl.constexpr = k_out_ring.dtype
    ROWS: gl.constexpr = 3 if DECAY == "scalar" else 1
    o_v = value_column % D + PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, D, gl.SliceLayout(0, STATE))
    o_state = state_slot * (D * D) + o_k[None, :] * D + o_v[:, None]
    dS = gl.full([HALF, D], 0.0, gl.float32, STATE)
    if BY_GAIN:
        if handed_on:
            dS = gl.load(d_initial + o_state)
    if HAS_FINAL:
        if handed_on == 0:
            dS = gl.load(d_final + o_state)
    zero = gl.full([HALF, C], 0.0, gl.float32, TOKENS)
    column = value_column + PART * HALF
    dS_rounded = dS.to(DTYPE)
    for i in range(count):
        stage = i % STAGES
        late = i % LATE_STAGES
        chunk = count - 1 - i
        of_stage = stage * ROWS
        k_in = k_in_ring.index(stage)
        AP = AP_ring.index(late)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        k_out = k_out_ring.index(stage)
        dS_left = gl.convert_layout(dS_rounded, LEFT)
        dU = warpgroup_mma(dS_left, k_out.permute((1, 0)), zero, use_acc=False, is_async=True)
        dO = d_output_ring.index(stage * PARTS + PART).permute((1, 0)).load(TOKENS)
        mbarrier.wait(late_full.index(late), (i // LATE_STAGES) & 1)
        P = AP.slice(C, C, dim=0).permute((1, 0))
        from_output = warpgroup_mma(gl.convert_layout(dO, LEFT), P, zero, use_acc=False, is_async=True)
        if KEEP:  # during these products
            tma.store_wait(1)
            d_states_buffer.store(dS_rounded)
            fence_async_shared()
            if IN_PLACE:
                half_tiles = d_states_high_tiles if PART == 1 else d_states_tiles
                at = [row, first + chunk * C, value_column]
                tma_store(half_tiles, at, as_tile(d_states_buffer, D))
            else:
                d_states_row = (slot + chunk * HV) * D + value_column % D + PART * HALF
                tma_store(d_states_tiles, [d_states_row, 0], d_states_buffer)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        if DECAY == "scalar":
            write = factor(factors, of_stage + WRITE)
            dO_out = dO.to(gl.float32) * factor(factors, of_stage + OUT)
        else:
            dO_out = dO.to(gl.float32) * scale
        dU, from_output = warpgroup_mma_wait(0, deps=[dU, from_output])
        if DECAY == "scalar":
            dU *= write
        dU_left = gl.convert_layout((dU + from_output).to(DTYPE), LEFT)
        Z = warpgroup_mma(dU_left, AP.slice(0, C, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        # This stands after a wait of this chunk: before one, ptxas would wait for all products in flight.
        dS = decayed(dS, totals, stage, DECAY)
        dS = warpgroup_mma(gl.convert_layout(dO_out.to(DTYPE), LEFT_STATE), q_ring.index(stage), dS, is_async=True)
        erased = -factor(factors, of_stage + ERASE)
        Z = warpgroup_mma_wait(1, deps=[Z])
        mbarrier.arrive(late_empty.index(late), count=1)
        dX = gl.convert_layout((Z * erased).to(DTYPE), LEFT_STATE)
        dS = warpgroup_mma(dX, k_in, dS, is_async=True)
        if KEEP:
            if SCALED:
                Z = gl.where(erased < -NEAR_ZERO, Z * -erased, Z)
            tma.store_wait(1)
            store_tile(Z_tiles, [row, first + chunk * C, column], Z_buffer, Z.to(DTYPE))
        dS = warpgroup_mma_wait(0, deps=[dS])
        dS_rounded = dS.to(DTYPE)
    if HAS_INITIAL:
        gl.store(d_initial + o_state, dS)
    if KEEP:
        tma.store_wait(0)


@jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def hopper_reverse_scan_kernel(
    q_tiles, k_in_tiles, k_out_tiles, d_output_tiles, AP_tiles, Z_tiles, d_states_tiles, d_states_high_tiles, beta, G,
    large_gain, d_final, d_initial, scale, T, NT, segments, chunks, HK, HV, DECAY: gl.constexpr, BY_GAIN: gl.constexpr,
    SEPARATE: gl.constexpr, UNDECAYED: gl.constexpr, HAS_FINAL: gl.constexpr, HAS_INITIAL: gl.constexpr,
    KEEP: gl.constexpr, SCALED: gl.constexpr, IN_PLACE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """`chunk.reverse_scan.reverse_scan_kernel` without STRICT, for heads of 128 channels, 16-bit inputs, unpacked rows.

    One program owns `64 * PARTS` value channels of one value head of one row or segment. Grid (2 / PARTS * HV * N).

    With IN_PLACE the gradients dS lie in the memory of q and `k_in`, and those of value channels from 64 on in
    `d_states_high_tiles`, with channels in place of the chunk's tokens. That takes one program per head (PARTS = 2), so
    that no other program reads these rows, and a partition stores its dS of a chunk only once the barrier `full` says
    that the copies of q and `k_in` to shared memory are complete.
    """
    DTYPE: gl.constexpr = k_out_tiles.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SPLIT: gl.constexpr = 2 // PARTS
    part = gl.program_id(0) % SPLIT
    i_h = gl.program_id(0) // SPLIT % HV
    i_n = gl.program_id(0) // (SPLIT * HV)
    row, first_chunk = i_n // segments, i_n % segments * chunks
    first = first_chunk * C
    slot = (row * NT + first_chunk) * HV + i_h
    count = gl.cdiv(gl.minimum(T - first, chunks * C), C)
    handed_on = False
    if BY_GAIN:
        stop = first_large(large_gain, slot, count, HV)
        handed_on = stop < count
        count = stop

    k_out_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    q_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    d_output_ring = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, C, HALF], OPERAND)
    AP_ring = gl.allocate_shared_memory(DTYPE, [LATE_STAGES, 2 * C, C], OPERAND)
    k_in_ring, Z_buffers, d_states_buffers, totals = (k_out_ring,) * 4
    if SEPARATE:
        k_in_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    if KEEP:
        Z_buffers = gl.allocate_shared_memory(DTYPE, [PARTS, C, HALF], OPERAND)
        d_states_buffers = gl.allocate_shared_memory(DTYPE, [PARTS, HALF, D], OPERAND)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * (3 if DECAY == "scalar" else 1), C], PLAIN)
    if DECAY != "none":
        totals = gl.allocate_shared_memory(gl.float32, [STAGES, D if DECAY == "channel" else 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    late_full = gl.allocate_shared_memory(gl.int64, [LATE_STAGES, 1], mbarrier.MBarrierLayout())
    late_empty = gl.allocate_shared_memory(gl.int64, [LATE_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=PARTS)
    for stage in gl.static_range(LATE_STAGES):
        mbarrier.init(late_full.index(stage), count=1)
        mbarrier.init(late_empty.index(stage), count=PARTS)
    fence_async_shared()

    key_column = i_h // (HV // HK) * D
    value_column = i_h * D + part * HALF
    rings = (q_ring, k_in_ring, k_out_ring, d_output_ring, AP_ring)
    barriers = (full, empty, late_full, late_empty)
    state_slot = (i_n * HV + i_h).to(gl.int64)
    walk = (
        (Z_tiles, d_states_tiles, d_states_high_tiles), rings, barriers, factors, totals,
        (Z_buffers, d_states_buffers), d_final, d_initial,
        (scale, row, first, value_column, slot, HV, count, state_slot), handed_on,
    )  # fmt: skip
    tiles = (q_tiles, k_in_tiles, k_out_tiles, d_output_tiles, AP_tiles)
    place = (scale, row, first, key_column, value_column, slot, HV, count)
    # A tuple in a variable would turn constants into run-time values, so the arguments stand here.
    if PARTS == 2:
        gl.warp_specialize([
            (gradient_partition, (walk, 0, DECAY, BY_GAIN, HAS_FINAL, HAS_INITIAL, KEEP,
                                  SCALED, IN_PLACE, PARTS, STAGES, LATE_STAGES)),
            (gradient_partition, (walk, 1, DECAY, BY_GAIN, HAS_FINAL, HAS_INITIAL, KEEP,
                                  SCALED, IN_PLACE, PARTS, STAGES, LATE_STAGES)),
            (copy_partition, (tiles, rings, barriers, factors, totals, beta, G, place, DECAY, UNDECAYED, SEPARATE,
                              PARTS, STAGES, LATE_STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (gradient_partition, (walk, 0, DECAY, BY_GAIN, HAS_FINAL, HAS_INITIAL, KEEP,
                                  SCALED, IN_PLACE, PARTS, STAGES, LATE_STAGES)),
            (copy_partition, (tiles, rings, barriers, factors, totals, beta, G, place, DECAY, UNDECAYED, SEPARATE,
                              PARTS, STAGES, LATE_STAGES)),
        ], [1], [24])  # fmt: skip


@per_plan
def _constants(plan: Plan, final: bool, initial: bool, keep: bool, in_place: bool) -> Constants:
    options = gluon_reverse_scan_options(keep, plan.decay, plan.separate, plan.many_scans)
    return gluon_scan_arguments(
        plan, options, HAS_FINAL=final, HAS_INITIAL=initial, KEEP=keep, SCALED=plan.route.gradients == "gluon",
        IN_PLACE=in_place,
    )  # fmt: skip


def launch_reverse_scan(
    p: Problem, kept: Kept, d_output: Tensor, Z: Tensor | None, d_states: tuple[Tensor | None, Tensor | None],
    d_final: Tensor | None, d_initial: Tensor | None, initial: bool,
) -> None:  # fmt: skip
    """Launch the part of `stages.reverse_scan` that is not strict; `initial`: the gradients of first states are wanted.

    If `d_states` are two tensors, they have the memory of queries and keys.
    """
    plan, ((q_in, k_in, k_out), (beta, G, AP, large_gain)) = p.plan, kept.scanned(p)
    assert q_in is not None and k_in is not None and k_out is not None and AP is not None
    low, high = d_states
    low_tiles, high_tiles = None if low is None else matrix_tiles(low, plan.V // 2), None
    if low is not None and high is not None:
        low_tiles, high_tiles = token_tiles(low, plan.K), token_tiles(high, plan.K)
    launch(
        hopper_reverse_scan_kernel,
        _constants(plan, d_final is not None, initial, low is not None, high is not None),
        token_tiles(q_in, plan.K),
        token_tiles(k_in, plan.K) if plan.separate else None,
        token_tiles(k_out, plan.K),
        token_tiles(d_output, plan.V // 2),
        matrix_tiles(AP, 2 * CHUNK),
        None if Z is None else token_tiles(Z, plan.V // 2),
        low_tiles, high_tiles,
        beta, G, large_gain, d_final, d_initial,
    )  # fmt: skip
