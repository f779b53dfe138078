"""The recurrence for one token (decoding), which reads the state once and writes it once.

A step has about one operation per byte of state, so it takes the time of a copy of the state. Each program takes a few
value columns of one head with all keys, `[K, BV]` in registers. Value columns never mix, so programs share nothing.
With `S~ = D S`, `u = beta (v - k^T S~)` and `S' = S~ + k u^T`, the output is

    o = scale * (q^T S~ + (q^T k) u)        and not        o = scale * q^T S'

which is the same number. In this form both sums over the keys depend only on the decayed state and run in parallel. The
last of several micro-steps uses it. An erase key replaces k in the correction u only.

Source: the recurrence of arXiv:2406.06484 (delta rule), arXiv:2412.06464 (scalar decay), arXiv:2510.26692 (decay per
channel).
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.call import SCHEMA, RuleCall
from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.ops.operator import Operator
from deltazoo.ops.triton.launch import Constants, launch

MAX_KEY_DIM = 256
"""All keys of a head are in one program's registers."""


class StepTile(NamedTuple):
    """The part of one head's state that a program owns."""

    columns: int
    """Value columns of one program, a power of two."""
    warps: int


@functools.cache
def choose_tile(K: int, V: int) -> StepTile:
    """The tile for heads of size `[K, V]`: 32 value channels, so rows of 128 bytes, and 64 elements per thread.

    It depends only on K and V, so a new batch size compiles nothing new. Measured on an H200 beside eight other tiles:
    benchmarks/results/decode_step_h200.json.
    """
    rows, columns = triton.next_power_of_2(K), min(32, triton.next_power_of_2(V))
    return StepTile(columns, warps=max(1, rows * columns // 2048))


_STRIDES = [f"{x}_{axis}" for x in "qkv" for axis in ("batch", "step", "head")]


# The alignment of the states is not listed: it allows 16-byte accesses.
@triton.jit(
    do_not_specialize=["scale", "HV", "GROUP", *_STRIDES],
    do_not_specialize_on_alignment=["q", "k", "v", "beta", "log_decay", "output", "erase_key"],
)
def step_kernel(
    q, k, v, beta, log_decay, state, new_state, output, erase_key, scale, HV, GROUP, q_batch, q_step, q_head, k_batch,
    k_step, k_head, v_batch, v_step, v_head, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr, MICRO_STEPS: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """Compute one token. Shapes are those of `RuleCall`; both states `[B, HV, K, V]` float32 may be one tensor.

    q, k and v have a contiguous last axis, and all other tensors are contiguous. Strides count elements. Grid (B * HV *
    V / BV).
    """
    COLUMN_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    matrix = (program // COLUMN_BLOCKS).to(tl.int64)  # index in [B, HV]; all offsets from it have 64 bits
    batch = matrix // HV
    head = matrix % HV
    keys = tl.arange(0, BK)
    columns = (program % COLUMN_BLOCKS) * BV + tl.arange(0, BV)
    key_mask = keys < K
    column_mask = columns < V

    # The state is loaded first: it is nearly all of the traffic, and everything up to its first use overlaps with it.
    tile = matrix * (K * V) + (keys[:, None] * V + columns[None, :])
    tile_mask = key_mask[:, None] & column_mask[None, :]
    S = tl.load(state + tile, mask=tile_mask, other=0.0)

    q += batch * q_batch + head // GROUP * q_head
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head * v_head
    token_head = batch * HV + head
    if MICRO_STEPS > 1:
        step_head = batch * MICRO_STEPS * HV + head
    if erase_key is not None:
        erase_key += (batch * MICRO_STEPS * (HV // GROUP) + head // GROUP) * K
    q_t = tl.load(q + keys, mask=key_mask, other=0.0)
    k_t = tl.load(k + keys, mask=key_mask, other=0.0)
    v_t = tl.load(v + columns, mask=column_mask, other=0.0)
    if log_decay is not None:
        if DECAY_PER_CHANNEL:
            g = tl.load(log_decay + token_head * K + keys, mask=key_mask, other=0.0)
        else:
            g = tl.load(log_decay + token_head)
    if beta is not None:
        b = tl.load(beta + (token_head if MICRO_STEPS == 1 else step_head)).to(tl.float32)
    if erase_key is not None:
        e_t = tl.load(erase_key + keys, mask=key_mask, other=0.0)
        erase_key += HV // GROUP * K

    q_t = q_t.to(tl.float32)
    for step in tl.static_range(MICRO_STEPS):
        if step < MICRO_STEPS - 1:  # the inputs of the next micro-step are loaded ahead
            k += k_step
            v += v_step
            step_head += HV
            next_k = tl.load(k + keys, mask=key_mask, other=0.0)
            next_v = tl.load(v + columns, mask=column_mask, other=0.0)
            if beta is not None:
                next_b = tl.load(beta + step_head).to(tl.float32)
            if erase_key is not None:
                next_e = tl.load(erase_key + keys, mask=key_mask, other=0.0)
                erase_key += HV // GROUP * K
        k_t = k_t.to(tl.float32)
        u = v_t.to(tl.float32)
        e = k_t if erase_key is None else e_t.to(tl.float32)
        if step == 0 and log_decay is not None:
            decay = tl.exp(g.to(tl.float32))
            if UNDECAYED:
                erased = tl.sum(S * e[:, None], axis=0)
            S *= decay[:, None] if DECAY_PER_CHANNEL else decay
        if step == MICRO_STEPS - 1:
            read = tl.sum(S * q_t[:, None], axis=0)
        if beta is not None:
            if step > 0 or not UNDECAYED:
                erased = tl.sum(S * e[:, None], axis=0)
            u = b * (u - erased)
        S += k_t[:, None] * u[None, :]
        if step < MICRO_STEPS - 1:
            k_t, v_t = next_k, next_v
            if beta is not None:
                b = next_b
            if erase_key is not None:
                e_t = next_e
    o = scale * (read + tl.sum(q_t * k_t, axis=0) * u)
    tl.store(output + token_head * V + columns, o.to(output.dtype.element_ty), mask=column_mask)

    tl.store(new_state + tile, S, mask=tile_mask)


@functools.lru_cache(maxsize=1024)
def _constants(
    q: torch.Size, v: torch.Size, strides: tuple[int, ...], scale: float, per_channel: bool, undecayed: bool,
    num_micro_steps: int,
) -> Constants:  # fmt: skip
    (B, _, H, K), (HV, V) = q, v[2:]
    tile = choose_tile(K, V)
    return Constants(
        B * HV * -(-V // tile.columns), scale=scale, HV=HV, GROUP=HV // H, **dict(zip(_STRIDES, strides, strict=True)),
        K=K, V=V, BK=triton.next_power_of_2(K), BV=tile.columns, DECAY_PER_CHANNEL=per_channel,
        MICRO_STEPS=num_micro_steps, UNDECAYED=undecayed, num_warps=tile.warps,
    )  # fmt: skip


def _launch(call: RuleCall, state: Tensor, new_state: Tensor) -> Tensor:
    """The output `[B, 1, HV, V]`, after filling `new_state`."""
    q, k, v, beta, log_decay, scale, _, _, _, erase_key, undecayed, num_micro_steps = call
    if v.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"the recurrent kernel takes float32, bfloat16 or float16, got {v.dtype}")
    if k.shape[3] > MAX_KEY_DIM:
        raise NotImplementedError(f"the recurrent kernel takes K <= {MAX_KEY_DIM}, got {k.shape[3]}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    beta, log_decay, erase_key = (None if x is None else x.contiguous() for x in (beta, log_decay, erase_key))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    per_channel = log_decay is not None and log_decay.ndim == 4
    constants = _constants(q.shape, v.shape, strides, scale, per_channel, undecayed, num_micro_steps)
    output = _output(q, v)
    launch(step_kernel, constants, q, k, v, beta, log_decay, state, new_state, output, erase_key)
    return output


def _output(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*q.shape[:2], *v.shape[2:])


def recurrent_step(call: RuleCall, *, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """Output and next state of one token, without gradients.

    The caller checks the shapes (`check_shapes`). No value is read back from the device.

    Args:
        call: a call of one token, from the state `initial_state`; K <= 256.
        inplace: whether the new state overwrites this one, which must then be contiguous and float32 (a static cache).

    Returns:
        Output `[B, 1, HV, V]` in v's dtype and the new state `[B, HV, K, V]`, float32: that of the call if `inplace`.

    Raises:
        ValueError: a state that cannot be updated in place.
        NotImplementedError: float64, or K > 256.
    """
    if inplace:
        assert call.initial_state is not None
        return _into_state.overload(*call), call.initial_state
    return _into_new.overload(*call)


def _functional(*arguments):
    call = RuleCall(*arguments)
    state: Any = call.initial_state
    state = state.to(torch.float32).contiguous()
    new_state = torch.empty_like(state)
    return _launch(call, state, new_state), new_state


def _in_place(*arguments):
    call = RuleCall(*arguments)
    state: Any = call.initial_state
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(
            f"a state updated in place must be contiguous and float32, got {state.dtype} with strides {state.stride()} "
            f"for shape {tuple(state.shape)}"
        )
    if not state.is_inference():  # autograd does not see the writes of a kernel
        torch.autograd.graph.increment_version(state)
    return _launch(call, state, state)


def _fake(q, k, v, beta, log_decay, scale, state, *_):
    return _output(q, v), state.new_empty(state.shape, dtype=torch.float32)


_into_new = Operator(f"recurrent_step({SCHEMA}) -> (Tensor, Tensor)", _functional, _fake)
_into_state = Operator(
    f"recurrent_step_({SCHEMA.replace('Tensor? initial_state', 'Tensor(a!) initial_state')}) -> Tensor",
    _in_place,
    lambda *arguments: _fake(*arguments)[0],
)
