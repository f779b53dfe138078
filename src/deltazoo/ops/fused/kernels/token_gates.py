"""The second maps of low-rank gates for a few rows: output gate and decay per channel, in one launch.

    g = x_g Wg^T + bias      a = x_a Wa^T + bias

A step's first product gives `x_g` and `x_a`, with queries, keys and values.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.fused.kernels.launch_ahead import launch_options, launches_ahead, wait_for_inputs
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["LowRankGate", "low_rank_gates"]


class LowRankGate(NamedTuple):
    """The second map of a gate."""

    weight: Tensor
    """`[N, rank]`, contiguous; a program holds all of the rank, which is for up to 512."""
    bias: Tensor | None = None
    """`[N]`."""

    @property
    def sizes(self) -> tuple[int, int]:
        """N and rank."""
        return self.weight.shape[0], self.weight.shape[1]


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
        row = tl.program_id(1)
        value = tl.load(x + row * M + inner, mask=inner < RANK, other=0.0)
        total = tl.sum(w.to(tl.float32) * value[None, :], axis=1) + added
        tl.store(y + row * WIDTH + columns, total, mask=column_mask)
    else:
        rows = tl.program_id(1) * BM + tl.arange(0, BM)
        values = tl.load(
            x + rows[:, None] * M + inner[None, :], mask=(rows < R)[:, None] & (inner < RANK)[None, :], other=0.0
        )
        totals = tl.dot(values.to(w.dtype), tl.trans(w), input_precision="ieee") + added[None, :]
        tl.store(y + rows[:, None] * WIDTH + columns[None, :], totals, mask=(rows < R)[:, None] & column_mask[None, :])


@triton.jit
def low_rank_gates_kernel(
    mixed,  # [R, M] float32; x_g from column FIRST on, then x_a
    gate_weight,  # [N_G, RANK_G], or None: no such output gate
    gate_bias,
    decay_weight,  # [N_A, RANK_A], or None: no such decay
    decay_bias,
    y,  # [R, N_G + N_A] float32
    R,
    M: tl.constexpr,
    FIRST: tl.constexpr,
    N_G: tl.constexpr,
    RANK_G: tl.constexpr,
    N_A: tl.constexpr,
    RANK_A: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    BA: tl.constexpr,
    AHEAD: tl.constexpr,
):
    GATE_BLOCKS: tl.constexpr = (N_G + BN - 1) // BN
    WIDTH: tl.constexpr = N_G + N_A
    block = tl.program_id(0)
    if gate_weight is not None:  # noqa: SIM102 (decided when it is compiled)
        if block < GATE_BLOCKS:
            _second_map(mixed + FIRST, gate_weight, gate_bias, y, block, R, M, N_G, RANK_G, WIDTH, BM, BN, BG, AHEAD)
    if decay_weight is not None:  # noqa: SIM102 (likewise)
        if block >= GATE_BLOCKS:
            _second_map(mixed + FIRST + RANK_G, decay_weight, decay_bias, y + N_G, block - GATE_BLOCKS, R, M, N_A,
                        RANK_A, WIDTH, BM, BN, BA, AHEAD)  # fmt: skip


def low_rank_gates(mixed: Tensor, first: int, gate: LowRankGate | None, decay: LowRankGate | None) -> Tensor:
    """Output gate and decay gate of a few rows, before their activations. No gradients: for inference.

    Args:
        mixed: `[R, M]` float32, contiguous: the outputs of the first maps among others.
        first: the column where they begin, those of the output gate before those of the decay.
        gate: of the output; None: it has none of low rank.
        decay: of the decay; None likewise.

    Returns:
        `[R, N]` float32: output gate, then decay gate.
    """
    R, M = mixed.shape
    sizes = tuple((0, 0) if x is None else x.sizes for x in (gate, decay))
    y = mixed.new_empty(R, sizes[0][0] + sizes[1][0])
    constants = _constants(R, M, first, sizes, launches_ahead(mixed.device))
    weights = [x for pair in (gate, decay) for x in pair or (None, None)]
    with torch.cuda.device_of(mixed):
        launch(low_rank_gates_kernel, constants, mixed, *weights, y)
    return y


@lru_cache(maxsize=1024)
def _constants(R: int, M: int, first: int, sizes: tuple[tuple[int, int], ...], ahead: bool) -> Constants:
    (n_g, rank_g), (n_a, rank_a) = sizes
    rows = 1 if R == 1 else min(64, max(16, triton.next_power_of_2(R)))
    outputs = 16 if R == 1 else 32
    inner = [max(16, triton.next_power_of_2(rank)) for rank in (rank_g, rank_a)]
    return Constants(
        -(-n_g // outputs) + -(-n_a // outputs), -(-R // rows), R=R, M=M, FIRST=first, N_G=n_g, RANK_G=rank_g, N_A=n_a,
        RANK_A=rank_a, BM=rows, BN=outputs, BG=inner[0], BA=inner[1], AHEAD=ahead, num_warps=4, **launch_options(ahead),
    )  # fmt: skip
