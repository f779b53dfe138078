"""Block sizes: one static table, no autotuning."""

from functools import lru_cache
from typing import NamedTuple

__all__ = ["CHUNK", "Tiles", "tiles_for"]

CHUNK = 64
"""Tokens per chunk, in every kernel."""


class Tiles(NamedTuple):
    """Launch options per kernel: tile sizes, warps, software-pipeline stages."""

    BK: int
    prepare: dict[str, int]
    channel: dict[str, int]
    scan: dict[str, int]
    keep: dict[str, int]
    reverse: dict[str, int]
    tail: dict[str, int]


def _options(warps: int, stages: int, BV: int | None = None) -> dict[str, int]:
    options = dict(num_warps=warps, num_stages=stages)
    return options if BV is None else options | dict(BV=BV, STAGES=stages)


@lru_cache
def tiles_for(K: int, V: int, half: bool, decay: int, terms: int) -> Tiles:
    """Tiles for head sizes K and V.

    Args:
        half: inputs are bfloat16 or float16, otherwise float32.
        decay: 0 none, 1 per head, 2 per channel.
        terms: matrices that store the inverse: 0 without beta, 1 fast, 3 strict.
    """
    BK = max(16, 1 << (K - 1).bit_length())
    BV = min(64, max(16, 1 << (V - 1).bit_length()))
    tile = dict(BK=min(BK, 32 if decay == 2 or not half else 64))
    prepare = _options(4, 1)
    if not half:
        serial = _options(4, 1, min(BV, 32 if BK <= 128 else 16))
        return Tiles(BK, prepare, prepare | tile, serial, serial, serial, _options(4, 1, min(BV, 32)) | tile)
    # Strict products and per-channel operands fill shared memory: then one wide program per multiprocessor. Eight warps
    # only with tiles of 128 value channels: over 64, Triton 3.6 has miscompiled them on Hopper (docs/log.md).
    wide = decay == 2 or terms == 3
    if BK == 256:
        serial = _options(4, 1 if wide else 2, min(BV, 32))
    elif wide and V > 64:
        serial = _options(8, 2, 128)
    else:
        serial = _options(4, 2, BV)
    return Tiles(BK, prepare, prepare | tile, serial, serial, serial, _options(4, 2, BV) | tile)
