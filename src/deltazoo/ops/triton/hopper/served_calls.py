"""Which calls the Gluon kernels serve. Plain Triton kernels take all others."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from deltazoo.ops.triton.tiling import CHUNK

if TYPE_CHECKING:
    from deltazoo.ops.triton.plan import Plan

__all__ = [
    "HEAD",
    "backward_refusal",
    "channel_gradients_refusal",
    "forward_refusal",
    "input_refusal",
    "multiprocessors",
    "refusal",
]

HEAD = 128
"""Channels per head, of keys and of values, that the kernels are made for."""

MAX_ROWS = 2**31 // (2 * CHUNK)
"""Chunks of all heads whose matrices, row by row, 32-bit coordinates can address."""

MIN_HEADS = 64
"""Heads of all sequences or segments from which one program per head is faster than several that fill the GPU."""

MIN_BUSY = 0.6
"""Share of the multiprocessors that the fused forward pass must keep busy to be faster than several kernels. Measured
with 80 heads of 4096 tokens: 0.17 ms without decay and 0.19 with, where several kernels take 0.21 and 0.23."""


def input_refusal(K: int, V: int, half: bool) -> str | None:
    """Why Gluon kernels serve no call with such heads and inputs; None if they do. `half`: 16-bit inputs."""
    if K != HEAD or V != HEAD:
        return f"heads have {K} key and {V} value channels, not {HEAD}"
    return None if half else "inputs are float32"


def refusal(plan: Plan) -> str | None:
    """Why a call's Gluon kernels do not serve it, in words; None if they do."""
    refused = input_refusal(plan.K, plan.V, plan.half)
    if refused is not None:
        return refused
    if not plan.has_beta:
        return "there are no step sizes"
    if plan.num_micro_steps > 1:
        return "tokens have several micro-steps"
    if plan.packed:
        return "rows are packed"
    if plan.slots == 0:
        return "there are no tokens"
    if plan.slots >= MAX_ROWS:
        return "there are more chunks than 32-bit coordinates address"
    return None


def backward_refusal(plan: Plan) -> str | None:
    """Why `backward_kernel` does not serve a call, in words; None if it does."""
    reason = refusal(plan)
    if reason is not None:
        return reason
    if plan.per_channel:
        return "decay is per channel"
    if plan.has_erase_key or plan.undecayed:
        return "the erase reads by another key, or before the decay"
    if plan.strict:
        return "precision is strict"
    if plan.heads * plan.segments < MIN_HEADS:
        return "there are few heads"
    return None


@lru_cache(maxsize=1024)
def forward_refusal(plan: Plan, dtype: torch.dtype, multiprocessors: int) -> str | None:
    """Why the fused forward pass does not serve a call, in words; None if it does."""
    reason = refusal(plan)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"inputs are {dtype}"
    if plan.strict:
        return "precision is strict"
    if plan.has_erase_key or plan.undecayed:
        return "the erase reads with other keys or before the decay"
    if plan.segments > 1:
        return "long rows are cut into segments"
    heads = plan.B * plan.HV
    if heads < MIN_BUSY * multiprocessors * -(-heads // multiprocessors):
        return f"{heads} heads in all leave multiprocessors idle"
    return None


def channel_gradients_refusal(plan: Plan, dtype: torch.dtype) -> str | None:
    """Why the chunk gradients of a call with decay per channel, strong or not, are not in Gluon; None if they are."""
    reason = refusal(plan)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:  # gradients may leave the range of float16
        return f"inputs are {dtype}"
    return "the erase reads before the decay" if plan.undecayed else None


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; a thread block of the fused kernels has one to itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count
