"""The recurrence for one token or a few (decoding), with the state read once and written once.

A step does about one operation per byte of state, so its time is that of a copy of the state. Each program takes a few
value columns of one head with all keys, `[K, BV]` in registers. Value columns never mix, so programs share nothing.
With `S~ = D S`, `u = beta (v - k^T S~)` and `S' = S~ + k u^T`, the output is

    o = scale * (q^T S~ + (q^T k) u)        and not        o = scale * q^T S'

which is the same number. In this form both sums over the keys depend only on the decayed state and run in parallel. Of
several micro-steps the last one takes it. An erase key stands for k in the correction u alone.

Source: the recurrence of arXiv:2406.06484 (delta rule), arXiv:2412.06464 (scalar decay), arXiv:2510.26692 (decay per
channel).
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.ops.operator import Operator
from deltazoo.ops.triton.launch import Constants
from deltazoo.ops.triton.launch import launch as launch_kernel

__all__ = ["MAX_KEY_DIM", "Tile", "choose_tile", "launch", "recurrent_step", "recurrent_steps"]

MAX_KEY_DIM = 256
"""All keys of a head are in one program's registers."""


class Tile(NamedTuple):
    """The part of one head's state that a program owns, and its launch options."""

    columns: int
    """Value columns of one program, a power of two."""
    warps: int
    eviction: str = ""
    """Triton's eviction policy for the state: "" or "evict_first"."""


@functools.cache
def choose_tile(K: int, V: int) -> Tile:
    """The tile for heads of size `[K, V]`: 32 value channels, so rows of 128 bytes, and 64 elements per thread.

    It depends only on K and V, so a new batch size compiles nothing new. Measured on an H200 beside eight other tiles:
    benchmarks/results/decode_step_h200.json.
    """
    rows, columns = triton.next_power_of_2(K), min(32, triton.next_power_of_2(V))
    return Tile(columns, warps=max(1, rows * columns // 2048))


# T is not listed, because T = 1 removes the loop; nor is the alignment of the states, which allows 16-byte accesses.
_STRIDES = [f"{x}_{axis}" for x in "qkv" for axis in ("batch", "token", "head")]
_UNSPECIALIZED = ["scale", "HV", "GROUP", *_STRIDES]
_UNALIGNED = ["q", "k", "v", "beta", "log_decay", "output", "T", "erase_key"]


@triton.jit(
    do_not_specialize=_UNSPECIALIZED,
    do_not_specialize_on_alignment=_UNALIGNED,
)
def decode_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T * MICRO_STEPS, H, K]
    v,  # [B, T * MICRO_STEPS, HV, V]
    beta,  # [B, T * MICRO_STEPS, HV] or None: no correction term
    log_decay,  # None, [B, T, HV] or [B, T, HV, K]
    state,  # [B, HV, K, V]
    new_state,  # the same shape, or the same memory
    output,  # [B, T, HV, V]
    erase_key,  # as k, contiguous, or None: k
    scale,
    T,
    HV,
    GROUP,
    q_batch,  # strides; the last axis of q, k and v is contiguous, all other tensors wholly so
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY_PER_CHANNEL: tl.constexpr,
    EVICTION: tl.constexpr,
    MICRO_STEPS: tl.constexpr,
    UNDECAYED: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    matrix = (program // COLUMN_BLOCKS).to(tl.int64)  # index in [B, HV]; all offsets from it have 64 bits
    batch = matrix // HV
    head = matrix % HV
    keys = tl.arange(0, BK)
    columns = (program % COLUMN_BLOCKS) * BV + tl.arange(0, BV)
    key_mask = keys < K
    column_mask = columns < V

    # The state first: it is nearly all of the traffic, and everything up to its first use overlaps with its load.
    tile = matrix * (K * V) + (keys[:, None] * V + columns[None, :])
    tile_mask = key_mask[:, None] & column_mask[None, :]
    S = tl.load(state + tile, mask=tile_mask, other=0.0, eviction_policy=EVICTION)

    q += batch * q_batch + head // GROUP * q_head
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head * v_head
    token_head = batch * T * HV + head
    if MICRO_STEPS > 1:
        step_head = batch * T * MICRO_STEPS * HV + head
    if erase_key is not None:
        erase_key += (batch * T * MICRO_STEPS * (HV // GROUP) + head // GROUP) * K
    for _ in range(T):
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
            if step < MICRO_STEPS - 1:  # what the next one takes is loaded ahead
                k += k_token
                v += v_token
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
        q += q_token
        k += k_token
        v += v_token
        token_head += HV
        if MICRO_STEPS > 1:
            step_head += HV

    tl.store(new_state + tile, S, mask=tile_mask, eviction_policy=EVICTION)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    new_state: Tensor,
    output: Tensor,
    scale: float,
    tile: Tile,
    erase_key: Tensor | None = None,
    undecayed: bool = False,
    num_micro_steps: int = 1,
) -> None:
    """Launch the kernel: read `state`, fill `new_state` and `output`.

    Args:
        q: `[B, T, H, K]`, k: `[B, T * n, H, K]`, v: `[B, T * n, HV, V]`; last axis contiguous, other strides free.
        beta: `[B, T * n, HV]` or None; log_decay: None, `[B, T, HV]` or `[B, T, HV, K]`; contiguous.
        state, new_state: `[B, HV, K, V]` float32, contiguous; may be one tensor.
        output: `[B, T, HV, V]`, contiguous.
        scale: factor on q.
        tile: of the state, per program.
        erase_key: as k and contiguous, or None: k.
        undecayed: the erase reads the state before the decay.
        num_micro_steps: n, updates per token.
    """
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    per_channel = log_decay is not None and log_decay.ndim == 4
    undecayed = undecayed and log_decay is not None
    constants = _constants(v.shape, q.shape, strides, scale, per_channel, tile, undecayed, num_micro_steps)
    launch_kernel(decode_kernel, constants, q, k, v, beta, log_decay, state, new_state, output, erase_key)


@functools.lru_cache(maxsize=1024)
def _constants(
    v: torch.Size, q: torch.Size, strides: tuple[int, ...], scale: float, per_channel: bool, tile: Tile,
    undecayed: bool, num_micro_steps: int,
) -> Constants:  # fmt: skip
    HV, V = v[2:]
    B, T, H, K = q
    return Constants(
        B * HV * -(-V // tile.columns),
        scale=scale,
        T=T,
        HV=HV,
        GROUP=HV // H,
        **dict(zip(_STRIDES, strides, strict=True)),
        K=K,
        V=V,
        BK=triton.next_power_of_2(K),
        BV=tile.columns,
        DECAY_PER_CHANNEL=per_channel,
        EVICTION=tile.eviction,
        MICRO_STEPS=num_micro_steps,
        UNDECAYED=undecayed,
        num_warps=tile.warps,
    )


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
    *,
    inplace: bool = False,
    erase_key: Tensor | None = None,
    undecayed: bool = False,
    num_micro_steps: int = 1,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence. No gradients: for inference.

    The caller checks the shapes (`check_step_shapes`). No value is read back from the device.

    Args:
        q: `[B, 1, H, K]` float32, bfloat16 or float16, K <= 256; k: `[B, n, H, K]`, v: `[B, n, HV, V]` of the same
            dtype, with n micro-steps.
        beta: `[B, n, HV]`, effective step size; None leaves the correction term out (linear attention).
        log_decay: None, `[B, 1, HV]` or `[B, 1, HV, K]`, natural log, <= 0; -inf clears the state.
        state: `[B, HV, K, V]`.
        scale: factor on q.
        inplace: write the new state into `state`, which must then be contiguous and float32 (a static cache).
        erase_key: `[B, n, H, K]` in k's dtype; None means k.
        undecayed: the erase reads the state before the decay.
        num_micro_steps: n, updates per token: one decay, then n times erase and write, then one output.

    Returns:
        Output `[B, 1, HV, V]` in v's dtype and the new state, float32: `state` itself if `inplace`.

    Raises:
        ValueError: more or less than one token, or a state that cannot be updated in place.
        NotImplementedError: float64, or K > 256.
    """
    if q.shape[1] != 1:
        raise ValueError(f"a step takes one token (T = 1), got T = {q.shape[1]}; use recurrent_steps for a few")
    return recurrent_steps(
        q, k, v, beta, log_decay, state, scale, inplace=inplace, erase_key=erase_key, undecayed=undecayed,
        num_micro_steps=num_micro_steps,
    )  # fmt: skip


def recurrent_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
    *,
    inplace: bool = False,
    erase_key: Tensor | None = None,
    undecayed: bool = False,
    num_micro_steps: int = 1,
) -> tuple[Tensor, Tensor]:
    """Several tokens in one launch, with the state in registers between them: right for any T, fast for a few.

    Arguments, results and errors as in `recurrent_step`, with T tokens; the state returned is the one after the last.
    """
    arguments = (q, k, v, beta, log_decay, state, scale, erase_key, undecayed, num_micro_steps)
    if inplace:
        return _into_state.overload(*arguments), state
    return _into_new.overload(*arguments)


def _functional(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, scale: float,
    *update: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state = state.to(torch.float32).contiguous()
    new_state = torch.empty_like(state)
    return _run(q, k, v, beta, log_decay, state, new_state, scale, *update), new_state


def _in_place(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, scale: float,
    *update: Any,
) -> Tensor:  # fmt: skip
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(
            f"a state updated in place must be contiguous and float32, got {state.dtype} with strides {state.stride()} "
            f"for shape {tuple(state.shape)}"
        )
    if not state.is_inference():  # autograd does not see what the kernel writes
        torch.autograd.graph.increment_version(state)
    return _run(q, k, v, beta, log_decay, state, state, scale, *update)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    new_state: Tensor,
    scale: float,
    erase_key: Tensor | None,
    undecayed: bool,
    num_micro_steps: int,
) -> Tensor:
    K, V = state.shape[2:]
    if v.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"the recurrent kernel takes float32, bfloat16 or float16, got {v.dtype}")
    if K > MAX_KEY_DIM:
        raise NotImplementedError(f"the recurrent kernel takes K <= {MAX_KEY_DIM}, got {K}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    beta, log_decay, erase_key = (None if x is None else x.contiguous() for x in (beta, log_decay, erase_key))
    output = _outputs(q, v)
    with torch.cuda.device_of(v):  # Triton launches on the current device
        tile = choose_tile(K, V)
        launch(q, k, v, beta, log_decay, state, new_state, output, scale, tile, erase_key, undecayed, num_micro_steps)
    return output


def _outputs(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty((*q.shape[:2], *v.shape[2:]))


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay"
_UPDATE = "Tensor? erase_key, bool undecayed, int num_micro_steps"
_into_new = Operator(
    f"recurrent_step({_ARGUMENTS}, Tensor state, float scale, {_UPDATE}) -> (Tensor, Tensor)",
    _functional,
    fake=lambda q, k, v, beta, log_decay, state, *rest: (
        _outputs(q, v),
        state.new_empty(state.shape, dtype=torch.float32),
    ),
)
_into_state = Operator(
    f"recurrent_step_({_ARGUMENTS}, Tensor(a!) state, float scale, {_UPDATE}) -> Tensor",
    _in_place,
    fake=lambda q, k, v, *rest: _outputs(q, v),
)
