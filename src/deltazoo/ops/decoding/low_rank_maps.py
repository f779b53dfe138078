"""The second maps of low-rank pairs for a few rows, in one launch: output gate, decay per channel, a further key.

    g = x_g Wg^T + bias      a = x_a Wa^T + bias

A step's first product gives `x_g` and `x_a`, with queries, keys and values.
"""

from collections.abc import Sequence
from typing import NamedTuple

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


@triton.jit
def _second_map(x, weight, bias, y, block, R, M: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
                WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                AHEAD: tl.constexpr):  # fmt: skip
    columns = block * BN + tl.arange(0, BN)
    column_mask = columns < N
    inner = tl.arange(0, BK)
    mask = column_mask[:, None] & (inner < RANK)[None, :]
    w = tl.load(weight + columns[:, None] * RANK + inner[None, :], mask=mask, other=0.0)
    added = tl.zeros([BN], tl.float32)
    if bias is not None:
        added += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    wait_for_inputs(AHEAD)
    if BM == 1:
        row = tl.program_id(1).to(tl.int64)
        value = tl.load(x + row * M + inner, mask=inner < RANK, other=0.0)
        total = tl.sum(w.to(tl.float32) * value[None, :], axis=1) + added
        tl.store(y + row * WIDTH + columns, total, mask=column_mask)
    else:
        rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
        values = tl.load(
            x + rows[:, None] * M + inner[None, :], mask=(rows < R)[:, None] & (inner < RANK)[None, :], other=0.0
        )
        totals = tl.dot(values.to(w.dtype), tl.trans(w), input_precision="ieee") + added[None, :]
        tl.store(y + rows[:, None] * WIDTH + columns[None, :], totals, mask=(rows < R)[:, None] & column_mask[None, :])


@triton.jit
def low_rank_gates_kernel(
    mixed,  # [R, M] float32
    weight_0,  # [N_0, RANK_0]; its input is the columns of mixed from FIRST_0 on
    bias_0,  # [N_0], or None
    weight_1,  # a second map, or None
    bias_1,
    weight_2,
    bias_2,
    y,  # [R, N_0 + N_1 + N_2] float32
    R,
    M: tl.constexpr, FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr, FIRST_1: tl.constexpr,
    N_1: tl.constexpr, RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr, RANK_2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr, BK_2: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    BLOCKS_0: tl.constexpr = (N_0 + BN - 1) // BN
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (N_1 + BN - 1) // BN
    WIDTH: tl.constexpr = N_0 + N_1 + N_2
    block = tl.program_id(0)
    if block < BLOCKS_0:
        _second_map(mixed + FIRST_0, weight_0, bias_0, y, block, R, M, N_0, RANK_0, WIDTH, BM, BN, BK_0, AHEAD)
    if weight_1 is not None:  # noqa: SIM102 (decided when it is compiled)
        if block >= BLOCKS_0 and block < BLOCKS_1:
            _second_map(mixed + FIRST_1, weight_1, bias_1, y + N_0, block - BLOCKS_0, R, M, N_1, RANK_1, WIDTH, BM, BN,
                        BK_1, AHEAD)  # fmt: skip
    if weight_2 is not None:  # noqa: SIM102 (likewise)
        if block >= BLOCKS_1:
            _second_map(mixed + FIRST_2, weight_2, bias_2, y + N_0 + N_1, block - BLOCKS_1, R, M, N_2, RANK_2, WIDTH,
                        BM, BN, BK_2, AHEAD)  # fmt: skip


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
    if not 1 <= len(gates) <= 3:
        raise ValueError(f"expected one to three maps, got {len(gates)}")
    R, M = mixed.shape
    sizes = tuple(gate.sizes for gate in gates)
    y = mixed.new_empty(R, sum(N for _, N, _ in sizes))
    weights: list[Tensor | None] = [x for gate in gates for x in (gate.weight, gate.bias)]
    weights += [None] * (6 - len(weights))
    launch_step(low_rank_gates_kernel, _constants, (R, M, sizes), mixed, *weights, y)
    return y


def _constants(R: int, M: int, sizes: tuple[tuple[int, int, int], ...]) -> Constants:
    rows = 1 if R == 1 else min(64, max(16, triton.next_power_of_2(R)))
    outputs = 16 if R == 1 else 32
    numbered: dict[str, int] = {}
    for number, (first, N, rank) in enumerate([*sizes, *[(0, 0, 0)] * (3 - len(sizes))]):
        inner = max(16, triton.next_power_of_2(rank))
        numbered |= {f"FIRST_{number}": first, f"N_{number}": N, f"RANK_{number}": rank, f"BK_{number}": inner}
    return Constants(
        sum(-(-N // outputs) for _, N, _ in sizes), -(-R // rows), R=R, M=M, BM=rows, BN=outputs, num_warps=4,
        **numbered,
    )  # fmt: skip
