"""Matrix products of a few rows, in parts over the inner channels, on the tensor cores.

    parts[s] = x[:, s-th channels] W[:, s-th channels]^T

With up to 64 rows a product takes the time of reading W. Torch's kernels leave multiprocessors idle there, since the
outputs alone do not make enough tiles. Here several programs share the channels of a tile; the operation after the
product adds up their parts (`between_products`, `convolution`), always in the same order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, prefetch_rows, wait_for_inputs
from deltazoo.ops.triton.launch import Constants

MOST_ROWS = 64
"""Most rows of a product in parts. With more, one product by torch is faster."""


class RowProductTile(NamedTuple):
    """The part of a product that a program computes, and its launch options."""

    rows: int
    outputs: int
    inner: int
    """Inner channels of one step of the loop."""
    parts: int
    """Programs that share the inner channels of a tile."""
    warps: int
    stages: int


@triton.jit
def row_product_kernel(
    x,  # [R, K]
    weight,  # [N, K]
    parts,  # [S, R, N] float32
    R,
    N: tl.constexpr, K: tl.constexpr, LENGTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    start = tl.program_id(2) * LENGTH
    if AHEAD:
        prefetch_rows(weight, columns, N, start, LENGTH, K, LINE, LINES)
    wait_for_inputs(AHEAD)
    row_mask = rows < R
    column_mask = columns < N
    total = tl.zeros([BM, BN], tl.float32)
    for offset in tl.range(0, LENGTH, BK, num_stages=STAGES):
        inner = offset + tl.arange(0, BK)
        channels = start + inner
        known = (inner < LENGTH) & (channels < K)
        a = tl.load(x + rows[:, None] * K + channels[None, :], mask=row_mask[:, None] & known[None, :], other=0.0)
        w = tl.load(
            weight + columns[None, :].to(tl.int64) * K + channels[:, None],
            mask=known[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(a, w, total, input_precision="ieee")
    outputs = (tl.program_id(2) * R + rows[:, None]) * N + columns[None, :]
    tl.store(parts + outputs, total, mask=row_mask[:, None] & column_mask[None, :])


@lru_cache(maxsize=1024)
def choose_tile(R: int, N: int, K: int) -> RowProductTile:
    """The tile for a product of R rows, in at most 96 KiB of shared memory, which every supported GPU has."""
    rows = min(64, max(16, triton.next_power_of_2(R)))
    outputs = 64 if N > 2048 else 32
    parts = max(1, min(8, round(256 / -(-N // outputs)), K // 256))  # about two programs per multiprocessor
    return RowProductTile(rows, outputs, 128, parts, warps=4, stages=3)


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` in parts whose sum is the product. It has no gradients.

    For more than `MOST_ROWS` rows, or in float32, torch computes the one part, which is faster.

    Args:
        x: `[R, K]`, contiguous. weight: `[N, K]` of the same dtype, contiguous.

    Returns:
        `[S, R, N]`, contiguous: float32, in one part in x's dtype.
    """
    (R, K), N = x.shape, weight.shape[0]
    if R > MOST_ROWS or x.dtype == torch.float32:
        return F.linear(x, weight)[None]
    tile = choose_tile(R, N, K)
    length = -(-K // (64 * tile.parts)) * 64  # channels of a part: whole lines, and aligned
    parts = x.new_empty(-(-K // length), R, N, dtype=torch.float32)
    launch_step(row_product_kernel, _constants, (R, N, K, tile, length, x.element_size()), x, weight, parts)
    return parts


def _constants(R: int, N: int, K: int, tile: RowProductTile, length: int, itemsize: int) -> Constants:
    line = 128 // itemsize
    return Constants(
        -(-N // tile.outputs), -(-R // tile.rows), -(-K // length), R=R, N=N, K=K, LENGTH=length, BM=tile.rows,
        BN=tile.outputs, BK=tile.inner, STAGES=tile.stages, LINE=line, LINES=triton.next_power_of_2(-(-length // line)),
        num_warps=tile.warps,
    )  # fmt: skip
