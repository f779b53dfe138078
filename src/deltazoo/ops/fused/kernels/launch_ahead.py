"""Kernels of a decoding step that start before the one in front of them has ended (programmatic dependent launch).

A step is a chain of short kernels, each of which reads weights that no kernel of the step writes. Launched ahead, a
kernel loads its weights while the kernel before it ends, and only then waits for that one's results.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["launches_ahead", "prefetch_rows", "wait_for_inputs"]


@triton.jit
def wait_for_inputs(AHEAD: tl.constexpr):
    """Let the next kernel start, and wait until all memory operations of the one before are visible.

    Every kernel that is launched ahead must call it, before it reads what another kernel of the step has written and
    before it writes anything.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_rows(weight, columns, N: tl.constexpr, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Ask for rows of a matrix `[N, K]` to be brought into the L2 cache, in lines of `LINE` elements, 128 bytes."""
    lines = tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    addresses = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K + lines[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@lru_cache
def launches_ahead(device: torch.device) -> bool:
    """Whether the device can start a kernel before the one in front has ended: compute capability 9.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
