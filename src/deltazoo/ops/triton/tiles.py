"""Tiles, warps and stages of every launch: static tables, no autotuning."""

from functools import lru_cache
from typing import NamedTuple

import triton

CHUNK = 64
"""Tokens per chunk, in every kernel."""

HEAD = 128
"""Channels per head, of keys and of values, in the Gluon kernels."""

HOPPER = 232_448
"""Shared memory that a thread block can use on Hopper, in bytes; data-center Ampere (8.0) has 166,912, GPUs for
desktops and inference (8.6, 8.9, 12.0) have 101,376."""


class Tiles(NamedTuple):
    """Launch options per kernel: tile sizes, warps, software-pipeline stages."""

    BK: int
    """Number of all key channels, as a power of two."""
    prepare: dict[str, int]
    invert: dict[str, int]
    prepare_channel: dict[str, int]
    chain: dict[str, int]
    scan: dict[str, int]
    scan_keep: dict[str, int]
    """Options of a scan that stores U and the states in place of the output."""
    reverse_scan: dict[str, int]
    gradients: dict[str, int]
    gradients_strong: dict[str, int]


def _options(warps: int, stages: int, BV: int | None = None) -> dict[str, int]:
    options = dict(num_warps=warps, num_stages=stages)
    return options if BV is None else options | dict(BV=BV, STAGES=stages)


def _scan_options(warps: int, stages: int, BV: int, BK: int, ahead: bool = False) -> dict[str, int]:
    return _options(warps, stages, BV) | dict(BK=BK, AHEAD=ahead)


@lru_cache
def tiles_for(
    K: int,
    V: int,
    half: bool,
    decay: str,
    has_beta: bool,
    strict: bool,
    separate: bool,
    shared: int = HOPPER,
    many_scans: bool = True,
) -> Tiles:
    """Tiles for head sizes K and V.

    Args:
        half: whether inputs are bfloat16 or float16, otherwise float32.
        decay: "none", "scalar" (per head) or "channel".
        has_beta: whether there are step sizes.
        strict: whether the serial scans take the inverse in two terms.
        separate: whether the scans read with other keys than they write.
        shared: the GPU's shared memory per thread block, in bytes (`shared_memory`).
        many_scans: whether there are so many independent scans that wide tiles fill the GPU.
    """
    BK = max(16, triton.next_power_of_2(K))
    BV = min(64, max(16, triton.next_power_of_2(V)))
    # Tiles of 64 key channels spill, unless the products read them from shared memory.
    tile = dict(BK=min(BK, 64 if half and decay != "channel" and shared >= HOPPER else 32))
    prepare, invert = _options(4, 1), _options(2, 1)
    # Every thread has 64 elements in registers, with 16-byte accesses along the channels.
    channel = prepare | dict(BK=min(BK, 128 if half else 32))
    channel |= dict(STRONG_BK=min(BK, 32))
    RUNS, STRONG_RUNS = (min((1024 if half else 512) // channel[tile], 32) for tile in ("BK", "STRONG_BK"))
    channel |= dict(RUNS=RUNS, STRONG_RUNS=STRONG_RUNS)
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
        return Tiles(BK, prepare, invert, channel, chain, serial, serial, reverse, gradients, gradients)
    output, keep, reverse = _serial(BK, BV, V, decay, has_beta, strict, separate, shared, many_scans)
    gradients = _options(4, 2, BV) | tile
    if shared >= HOPPER:
        gradients = _options(4, 3, BV) | tile
        if V <= 128:  # dO, U and Z stay in shared memory
            # Without decay, at 128 value channels, only two stages leave shared memory for two programs.
            gradients = _options(4, 3 if decay != "none" or V <= 64 else 2, max(16, triton.next_power_of_2(V))) | dict(
                BK=min(BK, 32)
            )
    # In 16 bits ptxas 12.8 loses a descriptor of shared memory in tiles of 16 key channels.
    gradients_strong = _options(4, 1, min(BV, 32)) | dict(BK=32)
    return Tiles(BK, prepare, invert, channel, chain, output, keep, reverse, gradients, gradients_strong)


def _serial(
    BK: int, BV: int, V: int, decay: str, has_beta: bool, strict: bool, separate: bool, shared: int, many_scans: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Options of the scan for the output, of the scan that keeps states, and of the reverse scan, for 16-bit inputs."""
    keys = (2 if separate else 1) * CHUNK * BK * 2  # bytes of one chunk's keys
    A, P, q = has_beta * CHUNK * CHUNK * 2, CHUNK * CHUNK * 2, CHUNK * BK * 2
    split = 2 * A if strict else 0  # the two terms of A, unpacked
    if shared < HOPPER:  # older matrix units read all operands from registers, which the warps divide among them
        if BK == 256:
            serial = _scan_options(4 if shared < 160_000 else 8, 1, min(BV, 32), BK)
        else:
            large = decay == "channel" or separate or strict
            serial = _scan_options(8 if BV == 64 else 4, 1 if large and shared < 160_000 else 2, BV, BK)
        return serial, serial, serial
    return (
        _hopper_scan(BK, BV, V, keys + A + P + q, split, 0, many_scans),
        _hopper_scan(BK, BV, V, keys + A, split, 2, many_scans),
        _hopper_scan(BK, BV, V, keys + A + P + q, split, 2, many_scans, largest=128 if decay == "none" else 64),
    )


def _hopper_scan(
    BK: int, BV: int, V: int, operands: int, single: int, kept: int, many_scans: bool, largest: int = 128
) -> dict[str, int]:
    """Options of a scan on Hopper: the most pipeline stages, and the largest tiles, that fit shared memory.

    With three stages the next chunk is copied while this one is processed; with two, every chunk waits for memory.
    Every stage has a copy of the `operands` of a chunk; there is one copy of `single` intermediate results; `kept` are
    bytes of each state element that the scan stores. A tile of the state has at most `largest` key channels.
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


FUSED_BACKWARD = dict(WALK_REGISTERS=160, GRADIENT_REGISTERS=168, COPY_REGISTERS=24, num_warps=4)
"""Options of the fused backward pass: registers per thread of its partitions; the partition that is not named gets the
rest."""

_FUSED_FORWARD = dict(STATE_REGISTERS=184, PREPARE_REGISTERS=120, COPY_REGISTERS=24, num_warps=4)

KEYS, PART, MATRIX, STATE = 2 * CHUNK * HEAD, 2 * CHUNK * HEAD // 2, 2 * CHUNK * CHUNK, 2 * HEAD * HEAD // 2
"""Bytes of tiles: keys of a chunk, values for a part of their channels, A or P, and a part of a state."""

BARRIERS = 448
"""Most bytes of barriers, and of the values that Triton passes to the partitions."""


def fused_forward_options(keep: bool, decay: str, output: bool) -> dict[str, int]:
    """Options of the fused forward pass: 219 of 227 KiB of shared memory, and all registers of a multiprocessor.

    There are three stages, or two if it keeps tensors for the backward pass, which take buffers, or has a decay per
    channel, whose keys and log-decays do. Without `output` there are four.
    """
    return _FUSED_FORWARD | dict(STAGES=4 if not output else 2 if keep or decay == "channel" else 3)


def gluon_scan_options(
    output: bool, keep: bool, values: bool, decay: str, separate: bool, strict: bool, many_scans: bool
) -> dict[str, int]:
    """Value channels per program, in parts of 64, and the stages of both rings of operands that fit shared memory.

    Args:
        output, keep, values: whether the scan stores the output, whether U and the states, and whether it has values
            (`chunk.scan`).
        decay: "none", "scalar" (per head) or "channel".
        separate: whether the scan reads with other keys than it writes.
        strict: whether the second term of A has a buffer.
        many_scans: whether programs of two parts fill the GPU.
    """
    parts = 2 if many_scans else 1
    factors = 4 * dict(none=CHUNK, scalar=4 * CHUNK + 1, channel=CHUNK + HEAD)[decay]
    stage = (1 + output) * KEYS + values * parts * PART + factors
    late_stage = separate * KEYS + (1 + output + strict) * MATRIX
    once = (output or keep) * parts * PART + keep * parts * STATE + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, late_stage)


def gluon_reverse_scan_options(keep: bool, decay: str, separate: bool, many_scans: bool) -> dict[str, int]:
    """Options of the reverse scan, see above; `keep`: whether it stores Z and the gradients of the states."""
    parts = 2 if many_scans else 1
    factors = 4 * dict(none=CHUNK, scalar=3 * CHUNK + 1, channel=CHUNK + HEAD)[decay]
    stage = (2 + separate) * KEYS + parts * PART + factors
    once = keep * parts * (PART + STATE) + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, 2 * MATRIX)


def _stages(free: int, stage: int, late_stage: int) -> dict[str, int]:
    """The most stages, at most four, and as many or one less for operands that a chunk needs late."""
    for count in (4, 3, 2):
        for late in (count, count - 1):
            if late > 1 and count * stage + late * late_stage <= free:
                return dict(STAGES=count, LATE_STAGES=late)
    raise AssertionError("two stages fit every kernel")
