"""Block sizes: one static table, no autotuning."""

from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["CHUNK", "HOPPER", "NARROW_CHANNEL", "Tiles", "shared_memory", "tiles_for"]

CHUNK = 64
"""Tokens per chunk, in every kernel."""

HOPPER = 232_448
"""Shared memory that a thread block can have on Hopper, in bytes; data-center Ampere (8.0) has 166,912, and cards for
desktops and inference (8.6, 8.9, 12.0) 101,376."""

NARROW_CHANNEL = "loop"
"""The tail for 16-bit inputs, decay per channel and V <= 64, which fits into one value tile. No candidate has been
right on a GPU yet, so `ops.api` refuses such calls; tests/ops/triton/test_narrow_values.py judges them all.

* `straight`: the loop over value tiles dissolves into straight code; wrong on an H200 with Triton 3.6.
* `loop`: the loop stays one, its count read at run time, as for larger V, which is right there.
* `halves`: value tiles of half the size, so that there are two.
* `unpipelined`: one pipeline stage.
"""


class Tiles(NamedTuple):
    """Launch options per kernel: tile sizes, warps, software-pipeline stages."""

    BK: int
    prepare: dict[str, int]
    channel: dict[str, int]
    scan: dict[str, int]
    keep: dict[str, int]
    reverse: dict[str, int]
    tail: dict[str, int | bool]


def _options(warps: int, stages: int, BV: int | None = None) -> dict[str, int]:
    options = dict(num_warps=warps, num_stages=stages)
    return options if BV is None else options | dict(BV=BV, STAGES=stages)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Shared memory that a thread block can have on a device, in bytes; Hopper's where there is no GPU."""
    if device.type != "cuda":
        return HOPPER
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


@lru_cache
def tiles_for(K: int, V: int, half: bool, decay: int, terms: int, shared: int = HOPPER) -> Tiles:
    """Tiles for head sizes K and V.

    Args:
        half: inputs are bfloat16 or float16, otherwise float32.
        decay: 0 none, 1 per head, 2 per channel.
        terms: matrices that store the inverse: 0 without beta, 1 fast, 3 strict.
        shared: the card's shared memory per thread block, in bytes (`shared_memory`).
    """
    BK = max(16, 1 << (K - 1).bit_length())
    BV = min(64, max(16, 1 << (V - 1).bit_length()))
    tile = dict(BK=min(BK, 32 if decay == 2 or not half else 64))
    prepare = _options(4, 1)
    if not half:
        serial = _options(4, 1, min(BV, 32 if BK <= 128 else 16))
        tail = _options(4, 1, min(BV, 32)) | tile | dict(COUNTED=False)
        return Tiles(BK, prepare, prepare | tile, serial, serial, serial, tail)
    serial = _serial(BK, BV, V, decay == 2 or terms == 3, shared)
    warps = 8 if shared < HOPPER and decay == 1 else 4  # ptxas gives up on four there: 32 registers, all else spilled
    tail = _options(warps, 2, BV) | tile | dict(COUNTED=False)
    if decay == 2 and V <= 64:
        tail |= _narrow_channel(BV)
    return Tiles(BK, prepare, prepare | tile, serial, serial, serial, tail)


def _serial(BK: int, BV: int, V: int, wide: bool, shared: int) -> dict[str, int]:
    """The scans for 16-bit inputs. Strict products and per-channel operands (`wide`) fill shared memory."""
    if shared < HOPPER:  # older matrix units read all operands from registers: the warps share them out
        if BK == 256:
            return _options(4 if shared < 160_000 else 8, 1, min(BV, 32))
        return _options(8 if BV == 64 else 4, 1 if wide and shared < 160_000 else 2, BV)
    if BK == 256:
        return _options(4, 1 if wide else 2, min(BV, 32))
    # One wide program per multiprocessor where shared memory is full. Eight warps only with tiles of 128 value
    # channels: over 64, Triton 3.6 has miscompiled them on Hopper (docs/log.md).
    return _options(8, 2, 128) if wide and V > 64 else _options(4, 2, BV)


def _narrow_channel(BV: int) -> dict[str, int | bool]:
    candidates: dict[str, dict[str, int | bool]] = dict(
        straight={},
        loop=dict(COUNTED=True),
        halves=dict(BV=max(16, BV // 2)),
        unpipelined=dict(COUNTED=True, num_stages=1, STAGES=1),
    )
    return candidates[NARROW_CHANNEL]
