"""How the norms cut rows into programs.

The kernels of the norms share no device functions: moving their address arithmetic or their sums into one changes the
PTX.
"""

import triton

__all__ = ["row_blocks"]

_ELEMENTS = 2048
"""Elements that a program works on at a time: 16 bytes of bfloat16 for each thread of eight warps."""


def row_blocks(R: int, D: int, most: int | None = None) -> tuple[int, dict[str, int]]:
    """Number of programs for R rows of D elements, at most `most`, and the tile of each: BR rows of BD columns."""
    columns = triton.next_power_of_2(D)
    rows = max(1, _ELEMENTS // columns)
    programs = max(1, -(-R // rows))
    return programs if most is None else min(programs, most), dict(BR=rows, BD=columns)
