"""Where the operands and results of Hopper's matrix instructions lie, as index arrays."""

from __future__ import annotations

import numpy as np

LANE = np.arange(32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Float32 to the bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) & 0xFFFF
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint32)


def to_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """Numbers to the bits of bf16 or f16."""
    return (
        to_bfloat16(x.astype(np.float32)) if kind == "bf16" else x.astype(np.float16).view(np.uint16).astype(np.uint32)
    )


def from_bits(bits: np.ndarray, kind: str) -> np.ndarray:
    """Operands of a product, given as bits of bf16, f16 or tf32, in float64."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)  # tf32


def tile_of_registers(values: list[np.ndarray], kind: str) -> np.ndarray:
    """Left operand `[warps, 16, k]` from its registers (bits, `[threads]` each): k is 16, or 8 for tf32."""
    warps, words = len(values[0]) // 32, [v.reshape(-1, 32) for v in values]
    tile = np.zeros((warps, 16, 8 if kind == "tf32" else 16))
    for i, word in enumerate(words):
        rows, column = LANE // 4 + 8 * (i % 2), i // 2
        if kind == "tf32":
            tile[:, rows, LANE % 4 + 4 * column] = from_bits(word, kind)
        else:
            for half in range(2):
                tile[:, rows, LANE % 4 * 2 + half + 8 * column] = from_bits((word >> (16 * half)) & 0xFFFF, kind)
    return tile


def columns_of_registers(values: list[np.ndarray], kind: str) -> np.ndarray:
    """Right operand `[warps, k, 8]` of `mma.sync` from its registers."""
    words = [v.reshape(-1, 32) for v in values]
    tile = np.zeros((len(words[0]), 8 if kind == "tf32" else 16, 8))
    for i, word in enumerate(words):
        if kind == "tf32":
            tile[:, LANE % 4 + 4 * i, LANE // 4] = from_bits(word, kind)
        else:
            for half in range(2):
                tile[:, LANE % 4 * 2 + half + 8 * i, LANE // 4] = from_bits((word >> (16 * half)) & 0xFFFF, kind)
    return tile


def result_position(register: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Row, counted over all warps, and column of what a result register holds in every thread."""
    warp, lane = np.divmod(np.arange(threads), 32)
    return 16 * warp + lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + lane % 4 * 2 + register % 2


def descriptor_bytes(descriptor: int, rows: int, kind: str, transposed: bool) -> np.ndarray:
    """Addresses `[rows, k, bytes]` of an operand of `wgmma` in shared memory, 32 bytes of k."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = {0: 16, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]  # of the swizzled row
    size = 4 if kind == "tf32" else 2
    r, k = np.arange(rows)[:, None], np.arange(32 // size)[None, :]
    if transposed:
        a = start + r // (width // size) * leading + k // 8 * stride + k % 8 * width + r % (width // size) * size
    elif width == 16:
        a = start + r // 8 * stride + r % 8 * 16 + k * size // 16 * leading + k * size % 16
    else:
        a = start + r // 8 * stride + r % 8 * width + k * size
    a ^= (a >> 7 & {16: 0, 32: 1, 64: 3, 128: 7}[width]) << 4
    return a[..., None] + np.arange(size)
