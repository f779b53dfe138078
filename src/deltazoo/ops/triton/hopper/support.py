"""Where the Gluon kernels can run, which calls they serve, and the tiles that they copy.

Gluon is Triton's language for kernels that choose layouts, copies and barriers themselves. It is experimental: names
may move from version to version. On a version that is not known, or that lacks a name, the plain Triton kernels serve
every call, and one warning says so.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from deltazoo.ops.triton.launch import Tile
from deltazoo.ops.triton.tiling import CHUNK, HOPPER

if TYPE_CHECKING:
    from deltazoo.ops.triton.plan import Plan

MISSING: str | None = None
"""What the installed Triton lacks for the Gluon kernels; None if it has everything."""
try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in 3.7
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        MISSING = f"the Gluon kernels are known to work with Triton 3.6 and 3.7 only, this is {triton.__version__}"
except (ImportError, AttributeError) as error:
    MISSING = f"Triton {triton.__version__} lacks a part of Gluon: {error}"

__all__ = [
    "BACKWARD",
    "FUSED_FORWARD",
    "KEPT_STAGES",
    "MISSING",
    "async_copy",
    "available",
    "backward_refusal",
    "barrier",
    "channel_gradients_refusal",
    "fence_async_shared",
    "forward_refusal",
    "gl",
    "input_refusal",
    "jit",
    "matrix_tiles",
    "mbarrier",
    "mma_v2",
    "multiprocessors",
    "refusal",
    "reverse_scan_options",
    "scan_options",
    "tma",
    "token_tiles",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

HEAD = 128
"""Channels per head, of keys and of values, that the kernels are made for."""

KEYS, PART, MATRIX, STATE = 2 * CHUNK * HEAD, 2 * CHUNK * HEAD // 2, 2 * CHUNK * CHUNK, 2 * HEAD * HEAD // 2
"""Bytes of tiles: keys of a chunk, values for a part of their channels, A or P, and a part of a state."""

BARRIERS = 448
"""Bytes at most of barriers, and of what Triton hands to the partitions."""

MAX_ROWS = 2**31 // (2 * CHUNK)
"""Chunks of all heads whose matrices, row by row, 32-bit coordinates can address."""


@lru_cache
def available(device: torch.device) -> bool:
    """Whether Gluon kernels run on this device with this Triton; warns once if only Triton stands in the way."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():  # tensors without data need none
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if triton.knobs.runtime.interpret:
        return False
    if MISSING is not None:
        _warn_once(MISSING)
        return False
    return True


@lru_cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}. Plain Triton kernels, which are slower, take their place.", stacklevel=2)


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


BACKWARD = dict(WALK_REGISTERS=168, GRADIENT_REGISTERS=160, COPY_REGISTERS=24, num_warps=4)
"""Options of `backward_kernel`: registers per thread of its partitions; the one that is not named gets what remains."""

MIN_HEADS = 64
"""Heads of all sequences or segments from which one program per head is faster than several that fill the GPU."""


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


def scan_options(
    output: bool, keep: bool, values: bool, decay: int, separate: bool, strict: bool, many_scans: bool
) -> dict[str, int]:
    """Value channels per program, as parts of 64, and the stages of both rings of operands that shared memory holds.

    Args:
        output, keep, values: as for `Plan.scan`.
        decay: 0 none, 1 per head, 2 per channel.
        separate: the scan reads other keys than it writes.
        strict: the second term of A has a buffer.
        many_scans: two parts per program fill the card.
    """
    parts = 2 if many_scans else 1
    factors = 4 * ((CHUNK, 4 * CHUNK + 1, CHUNK + HEAD)[decay])
    stage = (1 + output) * KEYS + values * parts * PART + factors
    late_stage = separate * KEYS + (1 + output + strict) * MATRIX
    once = (output or keep) * parts * PART + keep * parts * STATE + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, late_stage)


def reverse_scan_options(keep: bool, decay: int, separate: bool, many_scans: bool) -> dict[str, int]:
    """The same for the reverse scan; `keep` as for `Plan.reverse_scan`."""
    parts = 2 if many_scans else 1
    factors = 4 * ((CHUNK, 3 * CHUNK + 1, CHUNK + HEAD)[decay])
    stage = (2 + separate) * KEYS + parts * PART + factors
    once = keep * parts * (PART + STATE) + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, 2 * MATRIX)


def _stages(free: int, stage: int, late_stage: int) -> dict[str, int]:
    """The most stages, at most four, and of what a chunk needs late as many or one less."""
    for count in (4, 3, 2):
        for late in (count, count - 1):
            if late > 1 and count * stage + late * late_stage <= free:
                return dict(STAGES=count, LATE_STAGES=late)
    raise AssertionError("two stages fit every kernel")


FUSED_FORWARD = dict(STAGES=3, STATE_REGISTERS=184, PREPARE_REGISTERS=120, COPY_REGISTERS=24, num_warps=4)
"""Options of the fused forward pass: 219 of 227 KiB of shared memory, and all registers of a multiprocessor."""

KEPT_STAGES = 2
"""Stages where the fused forward pass keeps something for the backward pass, which takes buffers."""

MIN_BUSY = 0.6
"""Share of the multiprocessors that the fused forward pass must keep busy to be faster than several kernels. Measured
with 80 heads of 4096 tokens: 0.17 ms without decay and 0.19 with, where several kernels take 0.21 and 0.23."""


@lru_cache(maxsize=1024)
def forward_refusal(plan: Plan, dtype: torch.dtype, multiprocessors: int) -> str | None:
    """Why the fused forward pass does not serve a call, in words; None if it does."""
    reason = refusal(plan)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"inputs are {dtype}"
    if plan.per_channel:
        return "the decay is one per channel"
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


def token_tiles(x: Tensor, channels: int) -> Tile:
    """Tiles of a chunk of tokens by `channels` of one head, for x `[B, T, H, D]`.

    Coordinates are row of the batch, token, `head * D + channel`. Tokens beyond T are read as zero and not written.
    """
    B, T, H, D = x.shape
    return Tile(x, (B, T, H * D), (T * H * D, H * D, 1), (1, CHUNK, channels))


def matrix_tiles(x: Tensor, rows: int) -> Tile:
    """Tiles of `rows` full rows of x `[..., D]`; coordinates are the row, over all leading dimensions, and 0."""
    D = x.shape[-1]
    return Tile(x, (x.numel() // D, D), (D, 1), (rows, D))
