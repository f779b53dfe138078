"""The second maps of low-rank pairs for a few rows: output gate, decay per channel, a further key.

    g = x_g Wg^T + bias      a = x_a Wa^T + bias

A step's first product gives `x_g` and `x_a`, with queries, keys and values. For one row they take a launch of their
own; for more, programs of the launch that adds up the product's parts (`convolution`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, prefetch_rows, wait_for_inputs
from deltazoo.ops.triton.launch import Constants

__all__ = ["LowRankGate", "low_rank_gates", "map_sizes", "map_tensors", "second_maps"]


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


@triton.jit
def _second_map(parts, parts_bias, weight, bias, y, block, rows, R, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                RANK: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                AHEAD: tl.constexpr):  # fmt: skip
    columns = block * BN + tl.arange(0, BN)
    column_mask = columns < N
    added = tl.zeros([BN], tl.float32)
    if bias is not None:
        added += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    if BM == 1:
        inner = tl.arange(0, BK)
        mask = column_mask[:, None] & (inner < RANK)[None, :]
        w = tl.load(weight + columns[:, None] * RANK + inner[None, :], mask=mask, other=0.0)
        wait_for_inputs(AHEAD)
        row = rows.to(tl.int64)
        value = tl.load(parts + row * M + inner, mask=inner < RANK, other=0.0)
        total = tl.sum(w.to(tl.float32) * value[None, :], axis=1) + added
        tl.store(y + row * WIDTH + columns, total, mask=column_mask)
    else:
        STEP: tl.constexpr = min(BK, 32)
        if AHEAD:
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
            prefetch_rows(weight, columns, N, 0, RANK, RANK, LINE, (BK + LINE - 1) // LINE)
        wait_for_inputs(AHEAD)
        row = rows.to(tl.int64) * BM + tl.arange(0, BM)
        totals = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, RANK, STEP, num_stages=1):
            inner = start + tl.arange(0, STEP)
            known = (row < R)[:, None] & (inner < RANK)[None, :]
            values = tl.zeros([BM, STEP], tl.float32)
            if parts_bias is not None:
                values += tl.load(parts_bias + inner, mask=inner < RANK, other=0.0).to(tl.float32)[None, :]
            for part in tl.static_range(S):
                p = parts + (part * R + row)[:, None] * M + inner[None, :]
                values += tl.load(p, mask=known, other=0.0).to(tl.float32)
            mask = column_mask[None, :] & (inner < RANK)[:, None]
            w = tl.load(weight + columns[None, :] * RANK + inner[:, None], mask=mask, other=0.0)
            totals = tl.dot(values.to(w.dtype), w, totals, input_precision="ieee")
        totals += added[None, :]
        tl.store(y + row[:, None] * WIDTH + columns[None, :], totals, mask=(row < R)[:, None] & column_mask[None, :])


@triton.jit
def second_maps(
    parts,  # [S, R, M], whose sum over S are the first maps' outputs among others
    parts_bias,  # [M] or None, added to the sum
    weight_0,  # [N_0, RANK_0]; its input is the columns of the sum from FIRST_0 on
    bias_0,  # [N_0], or None
    weight_1,  # a second map, or None
    bias_1,
    weight_2,
    bias_2,
    y,  # [R, N_0 + N_1 + N_2] float32
    block,
    rows,
    R,
    S: tl.constexpr, M: tl.constexpr, FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr,
    FIRST_1: tl.constexpr, N_1: tl.constexpr, RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr,
    RANK_2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr,
    BK_2: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store BN outputs of all maps, those of a `block`, for BM `rows`."""
    BLOCKS_0: tl.constexpr = (N_0 + BN - 1) // BN
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (N_1 + BN - 1) // BN
    WIDTH: tl.constexpr = N_0 + N_1 + N_2
    if block < BLOCKS_0:
        added = None if parts_bias is None else parts_bias + FIRST_0
        _second_map(parts + FIRST_0, added, weight_0, bias_0, y, block, rows, R, S, M, N_0, RANK_0, WIDTH, BM, BN, BK_0,
                    AHEAD)  # fmt: skip
    if weight_1 is not None:  # noqa: SIM102 (decided when it is compiled)
        if block >= BLOCKS_0 and block < BLOCKS_1:
            added = None if parts_bias is None else parts_bias + FIRST_1
            _second_map(parts + FIRST_1, added, weight_1, bias_1, y + N_0, block - BLOCKS_0, rows, R, S, M, N_1, RANK_1,
                        WIDTH, BM, BN, BK_1, AHEAD)  # fmt: skip
    if weight_2 is not None:  # noqa: SIM102 (likewise)
        if block >= BLOCKS_1:
            added = None if parts_bias is None else parts_bias + FIRST_2
            _second_map(parts + FIRST_2, added, weight_2, bias_2, y + N_0 + N_1, block - BLOCKS_1, rows, R, S, M, N_2,
                        RANK_2, WIDTH, BM, BN, BK_2, AHEAD)  # fmt: skip


@triton.jit
def low_rank_gates_kernel(
    mixed, weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y, R,
    M: tl.constexpr, FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr, FIRST_1: tl.constexpr,
    N_1: tl.constexpr, RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr, RANK_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr, BK_2: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    second_maps(
        mixed, None, weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y, tl.program_id(0), tl.program_id(1), R, 1,
        M, FIRST_0, N_0, RANK_0, FIRST_1, N_1, RANK_1, FIRST_2, N_2, RANK_2, BM, BN, BK_0, BK_1, BK_2, AHEAD,
    )  # fmt: skip


def map_tensors(maps: Sequence[LowRankGate]) -> list[Tensor | None]:
    """The weights and biases of one to three maps, as the kernels take them.

    Raises:
        ValueError: no map, or more than three.
    """
    if not 1 <= len(maps) <= 3:
        raise ValueError(f"expected one to three maps, got {len(maps)}")
    tensors: list[Tensor | None] = [x for m in maps for x in (m.weight, m.bias)]
    return tensors + [None] * (6 - len(tensors))


def map_sizes(sizes: Sequence[tuple[int, int, int]]) -> dict[str, int]:
    """The constants of the kernels for maps of these `LowRankGate.sizes`, up to three."""
    numbered: dict[str, int] = {}
    for number, (first, N, rank) in enumerate([*sizes, *[(0, 0, 0)] * (3 - len(sizes))]):
        inner = max(16, triton.next_power_of_2(rank))
        numbered |= {f"FIRST_{number}": first, f"N_{number}": N, f"RANK_{number}": rank, f"BK_{number}": inner}
    return numbered


def low_rank_gates(mixed: Tensor, gates: Sequence[LowRankGate]) -> Tensor:
    """The outputs of one to three second maps for a few rows, before activations. It has no gradients.

    Args:
        mixed: `[R, M]` float32, contiguous: the outputs of the first maps among others.
        gates: the second maps.

    Returns:
        `[R, N]` float32: their outputs side by side, in their order.

    Raises:
        ValueError: no map, or more than three.
    """
    R, M = mixed.shape
    tensors, sizes = map_tensors(gates), tuple(gate.sizes for gate in gates)
    y = mixed.new_empty(R, sum(N for _, N, _ in sizes))
    launch_step(low_rank_gates_kernel, _constants, (R, M, sizes), mixed, *tensors, y)
    return y


def _constants(R: int, M: int, sizes: tuple[tuple[int, int, int], ...]) -> Constants:
    rows = 1 if R == 1 else min(64, max(16, triton.next_power_of_2(R)))
    outputs = 16 if R == 1 else 32
    return Constants(
        sum(-(-N // outputs) for _, N, _ in sizes), -(-R // rows), R=R, M=M, BM=rows, BN=outputs, num_warps=4,
        **map_sizes(sizes),
    )  # fmt: skip
