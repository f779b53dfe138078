"""The sum of the parts of a parameter's gradient that the programs of a backward pass leave, in one launch."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["sum_of_parts"]

_COLUMNS, _ROWS = 16, 128
"""Tile of a program: few columns, for there are few of them, and as many rows as registers hold well."""


@triton.jit(do_not_specialize=["P", "C"])
def sum_of_parts_kernel(parts, total, P, C, BP: tl.constexpr, BC: tl.constexpr):
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    sums = tl.zeros([BP, BC], tl.float32)
    for first in range(0, P, BP):
        rows = first + tl.arange(0, BP)
        mask = (rows < P)[:, None] & (columns < C)[None, :]
        sums += tl.load(parts + rows[:, None].to(tl.int64) * C + columns[None, :], mask=mask, other=0.0)
    tl.store(total + columns, tl.sum(sums, 0).to(total.dtype.element_ty), mask=columns < C)


@lru_cache(maxsize=1024)
def _constants(P: int, C: int) -> Constants:
    return Constants(-(-C // _COLUMNS), P=P, C=C, BP=_ROWS, BC=_COLUMNS, num_warps=4)


def sum_of_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over the first axis of float32 `parts [P, ...]`, a few hundred, in `dtype`; on their current device."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    launch(sum_of_parts_kernel, _constants(parts.shape[0], total.numel()), parts, total)
    return total
