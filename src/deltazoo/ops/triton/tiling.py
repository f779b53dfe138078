"""Block sizes: one static table, no autotuning."""

from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["CHUNK", "HOPPER", "Tiles", "shared_memory", "tiles_for"]

CHUNK = 64
"""Tokens per chunk, in every kernel."""

HOPPER = 232_448
"""Shared memory that a thread block can have on Hopper, in bytes; data-center Ampere (8.0) has 166,912, and cards for
desktops and inference (8.6, 8.9, 12.0) 101,376."""


class Tiles(NamedTuple):
    """Launch options per kernel: tile sizes, warps, software-pipeline stages."""

    BK: int
    prepare: dict[str, int]
    channel: dict[str, int]
    scan: dict[str, int]
    keep: dict[str, int]
    reverse: dict[str, int]
    tail: dict[str, int]
    tail_far: dict[str, int]
    pairs: dict[str, int]


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
        pairs = _options(4, 1, min(BV, 32))
        return Tiles(BK, prepare, prepare | tile, serial, serial, serial, pairs | tile, pairs | tile, pairs)
    serial = _serial(BK, BV, V, decay == 2 or terms == 3, shared)
    output = serial  # and the reverse scan
    if decay == 1 and V > 64 and BK <= 128 and shared >= HOPPER:
        output = _options(8, 2, 128)
    warps = 8 if shared < HOPPER and decay == 1 else 4  # ptxas gives up on four there: 32 registers, all else spilled
    pairs = _options(warps, 2, BV)
    tail = pairs | tile
    if decay == 2:
        tail |= _options(4, 3, min(BV, 32))
    tail_far = tail
    if decay == 2 and shared >= HOPPER:
        tail = tail | dict(maxnreg=168)  # three programs per multiprocessor
    return Tiles(BK, prepare, prepare | tile, output, serial, output, tail, tail_far, pairs)


def _serial(BK: int, BV: int, V: int, wide: bool, shared: int) -> dict[str, int]:
    """The scans for 16-bit inputs. Strict products and per-channel operands (`wide`) fill shared memory."""
    if shared < HOPPER:  # older matrix units read all operands from registers: the warps share them out
        if BK == 256:
            return _options(4 if shared < 160_000 else 8, 1, min(BV, 32))
        return _options(8 if BV == 64 else 4, 1 if wide and shared < 160_000 else 2, BV)
    if BK == 256:
        # States of 256 channels fill the registers of four warps twice over. Tiles of 32 rows take no asynchronous
        # products (docs/log.md), so eight warps are safe.
        return _options(8, 2, min(BV, 32))
    # One wide program per multiprocessor where shared memory is full. Eight warps only with tiles of 128 value
    # channels: over 64, Triton 3.6 has miscompiled them on Hopper (docs/log.md).
    return _options(8, 2, 128) if wide and V > 64 else _options(4, 2, BV)
