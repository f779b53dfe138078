"""The problem sizes of the benchmark table and of the sweep over sequence lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltazoo.names import unknown

__all__ = ["SWEEP", "TABLE", "Shape", "parse_shapes"]


@dataclass(frozen=True, order=True)
class Shape:
    """`B` sequences of `T` tokens, `H` heads, keys of `K` and values of `V` channels."""

    B: int
    T: int
    H: int
    K: int
    V: int

    def __str__(self) -> str:
        return f"{self.B}x{self.T}x{self.H}x{self.K}x{self.V}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads `BxTxHxKxV`; ValueError for anything else."""
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            raise ValueError(f"a shape reads BxTxHxKxV with positive integers, such as 8x4096x16x128x128; got {text!r}")
        return cls(*map(int, text.split("x")))

    @property
    def token_heads(self) -> int:
        """Tokens times heads: the work of all shapes is proportional to it."""
        return self.B * self.T * self.H


TABLE = {
    "train": Shape(8, 4096, 16, 128, 128),
    "long": Shape(1, 32768, 16, 128, 128),
    "small": Shape(4, 2048, 8, 128, 128),
    "narrow": Shape(8, 4096, 32, 64, 64),
    "wide": Shape(4, 4096, 6, 256, 512),
}
SWEEP = [Shape(1, T, 16, 128, 128) for T in (512 * 2**i for i in range(9))]


def parse_shapes(text: str) -> list[Shape]:
    """Shapes from a comma-separated list of names (`train`, ..., `table`, `sweep`) and `BxTxHxKxV`; no duplicates.

    Raises:
        ValueError: a name that does not exist (with the nearest one that does) or a malformed shape.
    """
    groups = {**{name: [shape] for name, shape in TABLE.items()}, "table": list(TABLE.values()), "sweep": SWEEP}
    shapes: list[Shape] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        if item in groups:
            shapes += groups[item]
        elif item[0].isdigit():
            shapes.append(Shape.parse(item))
        else:
            raise ValueError(f"{unknown('shape', item, groups)}, or BxTxHxKxV")
    if not shapes:
        raise ValueError("no shape given")
    return list(dict.fromkeys(shapes))
