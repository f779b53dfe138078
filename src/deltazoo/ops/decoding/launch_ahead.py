"""Kernels of a decoding step that start before the kernel in front of them has ended (programmatic dependent launch).

A step is a chain of short kernels, most of which read weights or states that no other kernel of the step writes.
Launched ahead, a kernel loads these while the kernel before it ends, and only then waits for that one's results.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltazoo.ops.triton.launch import Constants, launch


@triton.jit
def wait_for_inputs(AHEAD: tl.constexpr):
    """Let the next kernel start, and wait until the results of all earlier kernels are visible.

    Every kernel that is launched ahead must call it before it reads results of another kernel of the step and before it
    writes anything. So a kernel that has waited knows that all kernels before it have ended.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_rows(weight, columns, N: tl.constexpr, start, LENGTH: tl.constexpr, K: tl.constexpr, LINE: tl.constexpr,
                  LINES: tl.constexpr):  # fmt: skip
    """Prefetch channels `start` to `start + LENGTH` of rows of a matrix `[N, K]` into the L2 cache, in lines of `LINE`
    elements, 128 bytes."""
    inner = tl.arange(0, LINES) * LINE
    channels = start + inner
    addresses = weight + columns[:, None].to(tl.int64) * K + channels[None, :]
    known = (columns < N)[:, None] & ((channels < K) & (inner < LENGTH))[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, known.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@lru_cache
def launches_ahead(device: torch.device) -> bool:
    """Whether the device can start a kernel before the kernel in front has ended: compute capability 9.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_step(
    kernel: Any, constants: Callable[..., Constants], sizes: tuple[Any, ...], *tensors: Tensor | None
) -> None:
    """Launch a kernel of a step on the device of its tensors; ahead, where the device can.

    Args:
        kernel: kernel whose arguments are the tensors, then its constants, of which the last is AHEAD.
        constants: function of the sizes that gives the other constants and the grid; called once for each sizes.
        sizes: hashable numbers.
        tensors: contiguous tensors, except pages of states.
    """
    first = next(x for x in tensors if x is not None)
    with torch.cuda.device_of(first):
        launch(kernel, _constants(constants, sizes, launches_ahead(first.device)), *tensors)


def page_size(state: Tensor, state_indices: Tensor | None) -> int:
    """Elements from one page of states `[pages, ...]` to the next; 0 without indices, where rows are side by side."""
    return 0 if state_indices is None else state.stride(0)


@lru_cache(maxsize=8192)
def _constants(constants: Callable[..., Constants], sizes: tuple[Any, ...], ahead: bool) -> Constants:
    made = constants(*sizes)
    made.named |= {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}
    return made
