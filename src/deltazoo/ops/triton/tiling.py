"""Block sizes: one static table, no autotuning."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

__all__ = ["CHUNK", "HOPPER", "Tiles", "shared_memory", "tiles_for"]

CHUNK = 64
"""Tokens per chunk, in every kernel."""

HOPPER = 232_448
"""Shared memory that a thread block can use on Hopper, in bytes; data-center Ampere (8.0) has 166,912, and cards for
desktops and inference (8.6, 8.9, 12.0) have 101,376."""


class Tiles(NamedTuple):
    """Launch options per kernel: tile sizes, warps, software-pipeline stages."""

    BK: int
    """All key channels, as a power of two."""
    prepare: dict[str, int]
    invert: dict[str, int]
    prepare_channel: dict[str, int]
    chain: dict[str, int]
    scan: dict[str, int]
    scan_keep: dict[str, int]
    """It stores U and the states in place of the output."""
    scan_both: dict[str, int]
    """It stores all of them."""
    reverse_scan: dict[str, int]
    gradients: dict[str, int]
    gradients_strong: dict[str, int]


def _options(warps: int, stages: int, BV: int | None = None) -> dict[str, int]:
    options = dict(num_warps=warps, num_stages=stages)
    return options if BV is None else options | dict(BV=BV, STAGES=stages)


def _scan_options(warps: int, stages: int, BV: int, BK: int, ahead: bool = False) -> dict[str, int]:
    return _options(warps, stages, BV) | dict(BK=BK, AHEAD=ahead)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Shared memory that a thread block can use on a device, in bytes; Hopper's if there is no GPU."""
    if device.type != "cuda":
        return HOPPER
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


@lru_cache
def tiles_for(
    K: int,
    V: int,
    half: bool,
    decay: int,
    has_beta: bool,
    strict: bool,
    separate: bool,
    shared: int = HOPPER,
    many_scans: bool = True,
) -> Tiles:
    """Tiles for head sizes K and V.

    Args:
        half: inputs are bfloat16 or float16, otherwise float32.
        decay: 0 none, 1 per head, 2 per channel.
        has_beta: with step sizes.
        strict: the serial scans take the inverse in two terms.
        separate: the scans read other keys than they write.
        shared: the card's shared memory per thread block, in bytes (`shared_memory`).
        many_scans: there are enough independent scans that wide tiles fill the card too.
    """
    BK = max(16, triton.next_power_of_2(K))
    BV = min(64, max(16, triton.next_power_of_2(V)))
    # Tiles of 64 key channels spill, except where the products read them from shared memory.
    tile = dict(BK=min(BK, 64 if half and decay < 2 and shared >= HOPPER else 32))
    prepare, invert = _options(4, 1), _options(2, 1)
    # 64 elements in the registers of every thread, and 16-byte accesses along the channels
    channel = prepare | dict(BK=min(BK, 128 if half else 32))
    channel |= dict(RUNS=min((1024 if half else 512) // channel["BK"], 32), LEVEL_BK=min(BK, 32))
    if half and BK <= 64:
        channel |= dict(maxnreg=168)  # three programs per multiprocessor; only strong decay needs more
    # Three stages of float32 transitions fit Hopper's shared memory with up to 128 key channels.
    chain = _options(4, 3 if BK <= 128 else 1, 32) if shared >= HOPPER else _options(4, 1, 16)
    chain |= dict(BK=min(BK, 64))
    if not half:
        # Three-term products fill the registers. With larger tiles ptxas gives up: 32 registers, all else spilled.
        serial = _scan_options(8, 1, min(BV, 32), min(BK, 64))
        reverse = _scan_options(8, 1, min(BV, 32 if BK <= 64 else 16), min(BK, 64))
        gradients = _options(4, 1, min(BV, 32)) | tile
        return Tiles(BK, prepare, invert, channel, chain, serial, serial, serial, reverse, gradients, gradients)
    output, keep, both, reverse = _serial(BK, BV, V, decay, has_beta, strict, separate, shared, many_scans)
    gradients = _options(4, 2, BV) | tile
    if shared >= HOPPER:
        gradients = _options(4, 3, BV) | tile
        if V <= 128:  # dO, U and Z stay in shared memory
            # Without decay, at 128 value channels, only two stages leave shared memory for two programs.
            gradients = _options(4, 3 if decay or V <= 64 else 2, max(16, triton.next_power_of_2(V))) | dict(
                BK=min(BK, 32)
            )
    # In 16 bits ptxas 12.8 loses a descriptor of shared memory in tiles of 16 key channels.
    gradients_strong = _options(4, 1, min(BV, 32)) | dict(BK=32)
    return Tiles(BK, prepare, invert, channel, chain, output, keep, both, reverse, gradients, gradients_strong)


def _serial(
    BK: int, BV: int, V: int, decay: int, has_beta: bool, strict: bool, separate: bool, shared: int, many_scans: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """The scan for the output, the one that keeps states, the one for both, and the reverse scan; 16-bit inputs."""
    keys = (2 if separate else 1) * CHUNK * BK * 2  # bytes of one chunk's keys
    A, P, q = has_beta * CHUNK * CHUNK * 2, CHUNK * CHUNK * 2, CHUNK * BK * 2
    split = 2 * A if strict else 0  # the two terms of A, unpacked
    if shared < HOPPER:  # older matrix units read all operands from registers: the warps share them out
        if BK == 256:
            serial = _scan_options(4 if shared < 160_000 else 8, 1, min(BV, 32), BK)
        else:
            large = decay == 2 or separate or strict
            serial = _scan_options(8 if BV == 64 else 4, 1 if large and shared < 160_000 else 2, BV, BK)
        return serial, serial, serial, serial
    return (
        _hopper_scan(BK, BV, V, keys + A + P + q, split, 0, many_scans),
        _hopper_scan(BK, BV, V, keys + A, split, 2, many_scans),
        _hopper_scan(BK, BV, V, keys + A + P + q, split, 2, many_scans),
        _hopper_scan(BK, BV, V, keys + A + P + q, split, 2, many_scans, largest=64 if decay else 128),
    )


def _hopper_scan(
    BK: int, BV: int, V: int, operands: int, single: int, kept: int, many_scans: bool, largest: int = 128
) -> dict[str, int]:
    """Options of one of the scans on Hopper: the most pipeline stages, and the largest tiles, that shared memory holds.

    With three stages the next chunk is copied while this one is processed; with two, every chunk waits for memory.

    Args:
        operands: bytes of a chunk's operands, of which every stage has a copy.
        single: bytes of what is computed from them, of which there is one copy.
        kept: bytes of each state element that the scan stores.
        largest: most key channels in a tile of the state; fewer take fewer registers.
    """
    wide = V > 64 and many_scans
    BV = 128 if wide else BV
    for stages, tile in ((3, BK if largest >= BK else 64), (3, min(BK, 64)), (2, min(BK, 64))):
        values = 0 if wide else 4 * CHUNK * BV  # loaded into registers, or twice into shared memory
        if stages * operands + single + values + kept * BV * tile + 6 * 1024 <= HOPPER:
            # Eight warps, one program per multiprocessor, only with tiles of 128 value channels: over 64, Triton 3.6
            # has miscompiled them on Hopper (docs/log.md).
            return _scan_options(8 if wide else 4, stages, BV, tile, ahead=wide)
    # Tiles of 32 rows take synchronous products (docs/log.md), with a single copy of the operands.
    return _scan_options(8, 2, min(BV, 32), BK)
