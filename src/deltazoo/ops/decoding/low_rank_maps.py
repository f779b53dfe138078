"""The second maps of low-rank pairs for a few rows: output gate, decay per channel, a further key.

    g = x_g Wg^T + bias      a = x_a Wa^T + bias

A step's first product gives `x_g` and `x_a`, with queries, keys and values. For one row the maps have a launch of their
own; for several they are computed from the product's parts beside its convolutions (`convolution`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, wait_for_inputs
from deltazoo.ops.triton.launch import Constants


class LowRankGate(NamedTuple):
    """The second map of a low-rank pair."""

    first: int
    """First column of its input."""
    weight: Tensor
    """`[N, rank]`, contiguous; a program holds the whole rank, up to 512."""
    bias: Tensor | None = None
    """`[N]`."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`first`, N and rank."""
        return self.first, self.weight.shape[0], self.weight.shape[1]


MapSizes = tuple[tuple[int, int, int], ...]
"""The sizes of one to three maps."""


@triton.jit
def _second_map(parts, product_bias, FIRST: tl.constexpr, weight, bias, y, block, rows, R, S: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    columns = block * BN + tl.arange(0, BN)
    column_mask = columns < N
    inner = tl.arange(0, BK)
    inner_mask = inner < RANK
    mask = column_mask[:, None] & inner_mask[None, :]
    w = tl.load(weight + columns[:, None] * RANK + inner[None, :], mask=mask, other=0.0)
    added = tl.zeros([BN], tl.float32)
    if bias is not None:
        added += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    wait_for_inputs(AHEAD)
    if BM == 1:
        value = tl.load(parts + rows * M + FIRST + inner, mask=inner_mask, other=0.0)
        total = tl.sum(w.to(tl.float32) * value[None, :], axis=1) + added
        tl.store(y + rows * WIDTH + columns, total, mask=column_mask)
    else:
        row = rows * BM + tl.arange(0, BM)
        mask = (row < R)[:, None] & inner_mask[None, :]
        values = tl.zeros([BM, BK], tl.float32)
        if product_bias is not None:
            values += tl.load(product_bias + FIRST + inner, mask=inner_mask, other=0.0).to(tl.float32)[None, :]
        for part in tl.static_range(S):
            x = parts + (part * R + row[:, None]) * M + FIRST + inner[None, :]
            values += tl.load(x, mask=mask, other=0.0).to(tl.float32)
        totals = tl.dot(values.to(w.dtype), tl.trans(w), input_precision="ieee") + added[None, :]
        tl.store(y + row[:, None] * WIDTH + columns[None, :], totals, mask=(row < R)[:, None] & column_mask[None, :])


@triton.jit
def second_maps(
    program,  # of as many as there are blocks of BN outputs of all maps, for every BM rows
    parts,  # [S, R, M], whose sum over S is the product
    product_bias,  # [M], added to the product, or None
    weight_0,  # [N_0, RANK_0]; its input is the columns of the product from FIRST_0 on
    bias_0,  # [N_0], or None
    weight_1,  # a second map, or None
    bias_1,
    weight_2,
    bias_2,
    y,  # [R, N_0 + N_1 + N_2] float32
    R,
    S: tl.constexpr, M: tl.constexpr, FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr,
    FIRST_1: tl.constexpr, N_1: tl.constexpr, RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr,
    RANK_2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr,
    BK_2: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one program; the kernel does nothing else in it."""
    BLOCKS_0: tl.constexpr = (N_0 + BN - 1) // BN
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (N_1 + BN - 1) // BN
    BLOCKS_2: tl.constexpr = BLOCKS_1 + (N_2 + BN - 1) // BN
    WIDTH: tl.constexpr = N_0 + N_1 + N_2
    block = program % BLOCKS_2
    rows = (program // BLOCKS_2).to(tl.int64)
    if block < BLOCKS_0:
        _second_map(parts, product_bias, FIRST_0, weight_0, bias_0, y, block, rows, R, S, M, N_0, RANK_0, WIDTH, BM, BN,
                    BK_0, AHEAD)  # fmt: skip
    if weight_1 is not None:  # noqa: SIM102 (decided when it is compiled)
        if block >= BLOCKS_0 and block < BLOCKS_1:
            _second_map(parts, product_bias, FIRST_1, weight_1, bias_1, y + N_0, block - BLOCKS_0, rows, R, S, M, N_1,
                        RANK_1, WIDTH, BM, BN, BK_1, AHEAD)  # fmt: skip
    if weight_2 is not None:  # noqa: SIM102 (likewise)
        if block >= BLOCKS_1:
            _second_map(parts, product_bias, FIRST_2, weight_2, bias_2, y + N_0 + N_1, block - BLOCKS_1, rows, R, S, M,
                        N_2, RANK_2, WIDTH, BM, BN, BK_2, AHEAD)  # fmt: skip


@triton.jit
def low_rank_gates_kernel(
    mixed,  # [1, M] float32
    weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y,  # as of `second_maps`
    M: tl.constexpr, FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr, FIRST_1: tl.constexpr,
    N_1: tl.constexpr, RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr, RANK_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr, BK_2: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    second_maps(
        tl.program_id(0), mixed, None, weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y, 1, 1, M, FIRST_0, N_0,
        RANK_0, FIRST_1, N_1, RANK_1, FIRST_2, N_2, RANK_2, BM, BN, BK_0, BK_1, BK_2, AHEAD,
    )  # fmt: skip


def low_rank_gates(mixed: Tensor, gates: Sequence[LowRankGate]) -> Tensor:
    """The outputs of one to three second maps for one row, before activations. It has no gradients.

    Args:
        mixed: `[1, M]` float32, contiguous: the outputs of the first maps among others.
        gates: the second maps.

    Returns:
        `[1, N]` float32: their outputs side by side, in their order.

    Raises:
        ValueError: more rows than one; no map, or more than three.
    """
    if len(mixed) != 1:
        raise ValueError(f"expected one row, got {len(mixed)}: several rows take convolve_parts")
    tensors, sizes, y = map_arguments(mixed, gates)
    launch_step(low_rank_gates_kernel, _constants, (mixed.shape[1], sizes), mixed, *tensors, y)
    return y


def map_arguments(rows: Tensor, gates: Sequence[LowRankGate]) -> tuple[list[Tensor | None], MapSizes, Tensor]:
    """The weights and biases of one to three maps as kernels take them, their sizes, and a result for rows `[R, M]`."""
    if not 1 <= len(gates) <= 3:
        raise ValueError(f"expected one to three maps, got {len(gates)}")
    tensors: list[Tensor | None] = [x for gate in gates for x in (gate.weight, gate.bias)]
    sizes = tuple(gate.sizes for gate in gates)
    y = rows.new_empty(len(rows), sum(N for _, N, _ in sizes), dtype=torch.float32)
    return tensors + [None] * (6 - len(tensors)), sizes, y


def map_constants(outputs: int, sizes: MapSizes) -> tuple[int, dict[str, Any]]:
    """The blocks of so many outputs, and the constants of `second_maps` that say what the maps are."""
    numbered: dict[str, Any] = {"BN": outputs}
    for number, (first, N, rank) in enumerate([*sizes, *[(0, 0, 0)] * (3 - len(sizes))]):
        inner = max(16, triton.next_power_of_2(rank))
        numbered |= {f"FIRST_{number}": first, f"N_{number}": N, f"RANK_{number}": rank, f"BK_{number}": inner}
    return sum(-(-N // outputs) for _, N, _ in sizes), numbered


def _constants(M: int, sizes: MapSizes) -> Constants:
    blocks, numbered = map_constants(16, sizes)
    return Constants(blocks, M=M, BM=1, num_warps=4, **numbered)
