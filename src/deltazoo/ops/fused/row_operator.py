"""Operators of torch made of two functions that launch kernels over rows, one for each direction."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.fused.choice import REFUSAL
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.operator import DifferentiableOperator, Operator

_ELEMENTS = 2048
"""Elements that a program computes at a time: 16 bytes of bfloat16 for each thread of eight warps."""

_COLUMNS, _ROWS = 16, 128
"""Tile of a program that sums parts: few columns, since there are few, and many rows, as registers allow."""


def row_operator(
    schema: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    backward_schema: str | None = None,
    backward_fake: Callable[..., Any] | None = None,
    **differentiation: Any,
) -> DifferentiableOperator:
    """The operator `torch.ops.deltazoo.NAME` with its gradients, and `NAME_backward`, which computes them.

    Args:
        schema: schema for `torch.library.define`, the tensors first.
        forward: function of the arguments, with tensors contiguous and on the current device, that returns the results.
        backward: function of the arguments and of the gradients of the results that returns the tensors' gradients.
        fake: function for results without data; they are like the first arguments unless given.
        backward_schema, backward_fake: for a backward pass with other results, or with arguments that may be None. If
            it has other arguments, `save` and `gradients` are also needed.
        differentiation: `save` and `gradients`, see `DifferentiableOperator`.
    """
    if backward_schema is None:
        call, _, results = schema.partition(") -> ")
        upstream = ", ".join(f"Tensor d_{number}" for number in range(results.count("Tensor")))
        number = call.count("Tensor")
        gradients = f"({', '.join(['Tensor'] * number)})" if number > 1 else "Tensor"
        backward_schema = f"{call.replace('(', '_backward(', 1)}, {upstream}) -> {gradients}"
    backward_operator = Operator(backward_schema, backward, backward_fake, contiguous=True)
    return DifferentiableOperator(
        schema, forward, fake, contiguous=True, backward=backward_operator, refusal=REFUSAL, **differentiation
    )


def row_blocks(R: int, D: int, most: int | None = None) -> tuple[int, dict[str, int]]:
    """Number of programs for R rows of D elements, at most `most`, and the tile of each: BR rows of BD columns.

    Kernels share this, but no device functions: moving their address arithmetic or their sums into one changes the PTX.
    """
    columns = triton.next_power_of_2(D)
    rows = max(1, _ELEMENTS // columns)
    programs = max(1, -(-R // rows))
    return programs if most is None else min(programs, most), dict(BR=rows, BD=columns)


@lru_cache(maxsize=1024)
def element_constants(N: int, **named: Any) -> Constants:
    """Grid and constants of kernels over N elements; `named` constants are added."""
    return Constants(max(1, -(-N // _ELEMENTS)), N=N, BLOCK=_ELEMENTS, **named, num_warps=8)


@triton.jit(do_not_specialize=["P", "C", "C1", "C2"])
def sum_of_parts_kernel(parts, total, second, third, P, C, C1, C2, BP: tl.constexpr, BC: tl.constexpr):
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    sums = tl.zeros([BP, BC], tl.float32)
    for first in range(0, P, BP):
        rows = first + tl.arange(0, BP)
        mask = (rows < P)[:, None] & (columns < C)[None, :]
        sums += tl.load(parts + rows[:, None].to(tl.int64) * C + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(sums, 0).to(total.dtype.element_ty)
    if second is None:
        tl.store(total + columns, result, mask=columns < C)
    else:
        tl.store(total + columns, result, mask=columns < C1)
        tl.store(second + columns - C1, result, mask=(columns >= C1) & (columns < C2))
        tl.store(third + columns - C2, result, mask=(columns >= C2) & (columns < C))


@lru_cache(maxsize=1024)
def _constants(P: int, C: int, C1: int = 0, C2: int = 0) -> Constants:
    return Constants(-(-C // _COLUMNS), P=P, C=C, C1=C1, C2=C2, BP=_ROWS, BC=_COLUMNS, num_warps=4)


def sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of float32 `parts [P, ...]`, a few hundred, in `dtype`, on their current device.

    Such parts of a parameter's gradient come from the programs of a backward pass.
    """
    if parts.shape[0] == 1:
        return parts[0].to(dtype)
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    launch(sum_of_parts_kernel, _constants(parts.shape[0], total.numel()), parts, total, None, None)
    return total


def sums_of_parts(parts: Tensor, like: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of parts of three parameters of one dtype, whose parts are side by side: a tensor like each."""
    first, second, third = totals = tuple([torch.empty_like(x) for x in like])
    until = first.numel(), first.numel() + second.numel()
    launch(sum_of_parts_kernel, _constants(parts.shape[0], parts[0].numel(), *until), parts, *totals)
    return first, second, third
