"""The problem sizes of the benchmark table and of the sweep over sequence lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltazoo.names import unknown

__all__ = ["SWEEP", "TABLE", "Shape", "parse_shapes"]


@dataclass(frozen=True, order=True)
class Shape:
    """`B` sequences of `T` tokens, `H` heads, keys of `K` and values of `V` channels.

    `groups` value heads share a query and key head; written `BxTxH/HVxKxV` if there are several.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    groups: int = 1

    def __str__(self) -> str:
        heads = str(self.H) if self.groups == 1 else f"{self.H}/{self.HV}"
        return f"{self.B}x{self.T}x{heads}x{self.K}x{self.V}"

    @property
    def HV(self) -> int:
        """Value heads."""
        return self.H * self.groups

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads `BxTxHxKxV` or `BxTxH/HVxKxV`; ValueError for anything else."""
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*(/[1-9]\d*)?(x[1-9]\d*){2}", text):
            raise ValueError(
                "a shape reads BxTxHxKxV with positive integers, such as 8x4096x16x128x128, or BxTxH/HVxKxV with HV "
                f"value heads; got {text!r}"
            )
        B, T, heads, K, V = text.split("x")
        H, _, value_heads = heads.partition("/")
        groups, rest = divmod(int(value_heads or H), int(H))
        if rest or not groups:
            raise ValueError(f"value heads are a multiple of key heads, got {heads} in {text!r}")
        return cls(int(B), int(T), int(H), int(K), int(V), groups)

    @property
    def token_heads(self) -> int:
        """Tokens times value heads: the work of all shapes is proportional to it."""
        return self.B * self.T * self.HV


TABLE = {
    "train": Shape(8, 4096, 16, 128, 128),
    "long": Shape(1, 32768, 16, 128, 128),
    "small": Shape(4, 2048, 8, 128, 128),
    "narrow": Shape(8, 4096, 32, 64, 64),
    "wide": Shape(4, 4096, 6, 256, 512),
    "grouped": Shape(8, 4096, 4, 128, 128, groups=4),
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
